"""The house command: what holds a crate or a Python package together, in figures, and bounds for them.

- `code`: what is read from both languages: files, modules, uses, functions that belong to a type.
- `rust`, `python`: readers of the two languages, by their parsers.
- `names`: which file defines what a path names, through modules, uses and re-exports.
- `figures`: lines, circles and largest types of each package.
- `limits`: the bounds, and the known excesses, which may only shrink.

`tools/house.py` is the command. It takes the development environment, which has the parser of Rust.
"""
