"""`python -m kvik.demo` is `kvik demo`."""

from kvik.demo.show import main

main()
