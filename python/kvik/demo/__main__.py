"""`python -m kvik.demo` is `kvik demo`."""

from kvik.demo.show import demo

demo()
