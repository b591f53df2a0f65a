"""The lab: experiments designed, tables audited, and conclusions that hold.

`kvik lab` is its command. Nothing of it touches an engine: a study is a file, a table is a text, and both can
be examined on a machine without a network or a GPU. It is the distribution `kvik-lab`, of the same version as
kvik, uses kvik's public Python interface alone, and comes with `pip install 'kvik[lab]'`.
"""
