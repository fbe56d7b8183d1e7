"""What a model writes, taken apart while it comes: reasoning, text, tool calls. One file a family; `registry` chooses.

A parser is a generator over the text that has come so far: it waits where it needs more, so one description serves a
stream and a whole answer. Text that may begin a marker is held back; nothing that was written is lost: what looks like
a call and is none is passed on as text.
"""
