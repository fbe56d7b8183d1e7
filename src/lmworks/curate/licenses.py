"""The licence of a source file, as its header says it: an SPDX line, or the words that licences ask for.

It is what a file says of itself, no more: a file without a header has the licence of its project, which is not seen
here.
"""

from __future__ import annotations

import re

LOOKED_AT = 4000  # characters
SPDX = re.compile(r"SPDX-License-Identifier:\s*([^\n\r*]+)")
PERMISSIVE = {
    *("MIT", "MIT-0", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSD", "ISC", "Zlib", "BSL-1.0", "Unlicense"),
    *("CC0-1.0", "0BSD", "Python-2.0", "PostgreSQL", "NCSA", "X11", "blessing", "Unicode-3.0"),
}
WORDS = (
    ("Apache-2.0", r"Licensed under the Apache License, Version 2\.0|www\.apache\.org/licenses/LICENSE-2\.0"),
    ("AGPL-3.0", r"GNU Affero General Public License"),
    ("LGPL", r"GNU (?:Lesser|Library) General Public License"),
    ("GPL", r"GNU General Public License"),
    ("MPL-2.0", r"Mozilla Public License,? v(?:ersion|\.) ?2\.0"),
    ("BSL-1.0", r"Boost Software License"),
    ("EPL-2.0", r"Eclipse Public License"),
    (
        "MIT",
        r"Permission is hereby granted, free of charge, to any person obtaining a copy|\bMIT License\b|under the MIT",
    ),
    ("ISC", r"Permission to use, copy, modify, and(?:/or)? distribute this software for any purpose"),
    (
        "BSD-3-Clause",
        r"Redistribution and use in source and binary forms.{0,1500}(?:Neither the name|may not be used to endorse)"
        r"|3-clause BSD|BSD 3-Clause",
    ),
    ("BSD-2-Clause", r"Redistribution and use in source and binary forms|2-clause BSD|BSD 2-Clause"),
    ("BSD", r"BSD[- ]style license"),
    ("Zlib", r"This software is provided 'as-is', without any express or implied"),
    ("CC0-1.0", r"CC0 1\.0 Universal"),
    ("Unlicense", r"This is free and unencumbered software released into the public domain"),
)
HEADER = re.compile("|".join(f"(?P<L{number}>{words})" for number, (_, words) in enumerate(WORDS)), re.DOTALL | re.I)
MARKS = re.compile(r"[ \t]*\n[ \t]*(?:\*|//|#|;|--|!|dnl|REM)*[ \t]*|[ \t]+")  # line breaks and comment marks


def license_of(text: str) -> str:
    """Its SPDX name; "GPL" where the header does not say which version; empty where there is none."""
    begin = text[:LOOKED_AT]
    if found := SPDX.search(begin):
        return spdx_name(found.group(1))
    found = HEADER.search(MARKS.sub(" ", begin))
    return WORDS[int(found.lastgroup[1:])][0] if found and found.lastgroup else ""


def spdx_name(expression: str) -> str:
    """Of `(GPL-2.0 OR MIT)` a permissive choice where there is one, else the first; with AND all of it."""
    expression = re.sub(r"\s*(?:-->|\*/|\"|').*$", "", expression).strip()
    if " AND " in expression:
        return expression.strip("()")
    names = [name.strip("() ").partition(" WITH ")[0] for name in re.split(r"\s+OR\s+", expression)]
    return next((name for name in names if name in PERMISSIVE), names[0])
