"""Both devices, and jobs that take one away and bring it back.

The routes are those of `init.sh`: the kernel drops them with the link.
"""

from dataclasses import dataclass

from tests.rdma.guest import Job


@dataclass(frozen=True)
class Device:
    """A soft-RoCE device, the end of the cable that it is on, its addresses, and those of the other end."""

    name: str
    end: str
    v4: str
    v6: str
    peer_v4: str
    peer_v6: str
    table: int  # of the routes to the other end

    def link_down(self) -> Job:
        """Take down the network link; both devices lose their ports."""
        return Job(f"{self.end} down", ["ip", "link", "set", self.end, "down"])

    def link_up(self) -> Job:
        """Bring the network link back, with what the kernel dropped."""
        lines = (
            f"link set {self.end} up",
            f"-6 addr replace {self.v6}/64 dev {self.end} nodad",
            f"route replace {self.peer_v4} dev {self.end} table {self.table}",
            f"-6 route replace {self.peer_v6} dev {self.end} table {self.table}",
        )
        return Job(f"{self.end} up", ["sh", "-ec", "\n".join(f"ip {line}" for line in lines)])

    def remove(self) -> Job:
        """Delete the RDMA device, as when a card is pulled out; its link stays."""
        return Job(f"delete {self.name}", ["rdma", "link", "delete", self.name])

    def add(self) -> Job:
        """Make the RDMA device anew."""
        argv = ["rdma", "link", "add", self.name, "type", "rxe", "netdev", self.end]
        return Job(f"add {self.name}", argv)


LEFT = Device("rxe0", "d0", "10.9.0.1", "fd09::1", "10.9.0.2", "fd09::2", 10)
RIGHT = Device("rxe1", "d1", "10.9.0.2", "fd09::2", "10.9.0.1", "fd09::1", 11)
V4_GID, V6_GID = 1, 2  # the indices of the addresses' GIDs, in both devices
