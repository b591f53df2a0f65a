"""Reports of experiments: one value, and what it looks like as HTML, Markdown and JSON.

`model.Report` holds sections of text, tables, figures and claims; `figures` has one type for each kind of
figure, all of plain data. `html.to_html`, `markdown.to_markdown`, `codec.to_json` and `codec.from_json` are
its renderings. `build.build_report` makes a report of measurements in long form, as `kvik lab report` does.
"""
