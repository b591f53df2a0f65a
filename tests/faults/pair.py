"""Two sides with the proxy between them, both ways."""

from typing import Any

from kvik.roles.ports import free_ports
from tests.faults.proxy import Proxy
from tests.faults.side import Handle


class Pair:
    """Two engines, `here` and `there`; who connects to one of them goes through that one's forward."""

    def __init__(self, transport: str, names: tuple[str, str] = ("here", "there"), **options: Any) -> None:
        self.transport, self.options = transport, options
        self.proxy = Proxy()
        self.ports = dict(zip(names, free_ports(2), strict=True))
        self.forwards = {name: self.proxy.open(self.ports[name]) for name in names}
        starting = {name: self._launch(name) for name in names}
        self.sides = {name: handle.ready() for name, handle in starting.items()}

    def _launch(self, name: str) -> Handle:
        listen, forward = f"127.0.0.1:{self.ports[name]}", f"127.0.0.1:{self.forwards[name]}"
        transport = self.transport if self.transport in ("tcp", "nics") else "auto"
        return Handle(listen=listen, advertise=forward, transport=transport, name=name, **self.options)

    def start_again(self, name: str) -> Handle:
        """Start a side anew at its address; the old one is killed if it still runs."""
        self.sides[name].close()
        self.sides[name] = self._launch(name).ready()
        return self.sides[name]

    def close(self) -> None:
        """End everything."""
        for handle in self.sides.values():
            handle.close()
        self.proxy.close()
