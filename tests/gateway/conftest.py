"""A small model for the servers behind the gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny import make_spec, train

TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="session")
def model(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    spec = make_spec(dataset, "model.context=512", "optim.steps=4")
    train(spec, folder / "tiny")
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder
