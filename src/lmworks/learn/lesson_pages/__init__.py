"""The course as Markdown and notebooks: what docs/course/ holds, and what an exported class gets."""
