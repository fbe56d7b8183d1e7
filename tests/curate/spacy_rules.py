"""Reads the rules of spaCy's English tokenizer and datatrove's lists of characters.

`python tests/curate/spacy_rules.py` writes them to src/lmworks/curate/english.json, in an environment that has both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "src" / "lmworks" / "curate" / "english.json"


def rules() -> dict[str, Any]:
    import spacy
    from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION
    from spacy.pipeline.sentencizer import Sentencizer

    tokenizer = spacy.blank("en").tokenizer
    return {
        "notice": "Rules of spaCy's English tokenizer and sentencizer (3.8, (C) ExplosionAI GmbH, MIT License) and "
        "sets of characters of datatrove 0.10 (Apache License 2.0)",
        "prefix": tokenizer.prefix_search.__self__.pattern,
        "suffix": tokenizer.suffix_search.__self__.pattern,
        "infix": tokenizer.infix_finditer.__self__.pattern,
        "url": tokenizer.url_match.__self__.pattern,
        "special_cases": {
            text: [token[65] for token in tokens]
            for text, tokens in sorted(tokenizer.rules.items())
            if not any(c.isspace() for c in text)
        },
        "sentence_ends": "".join(sorted(Sentencizer.default_punct_chars)),
        "punctuation": "".join(sorted(PUNCTUATION_SET)),
        "terminal_punctuation": "".join(sorted(TERMINAL_PUNCTUATION)),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(rules(), ensure_ascii=True, indent=0) + "\n", encoding="utf-8")
