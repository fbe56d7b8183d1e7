"""What pyproject.toml cannot say: the package describes itself by README.md with links that work anywhere."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "lmworks/lmworks"
VERSION = "main"


def absolute(match: re.Match[str]) -> str:
    image, text, target = match.groups()
    if image:
        return f"![{text}](https://raw.githubusercontent.com/{REPOSITORY}/{VERSION}/{target})"
    return f"[{text}](https://github.com/{REPOSITORY}/blob/{VERSION}/{target})"


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)", absolute, readme),
    long_description_content_type="text/markdown",
)
