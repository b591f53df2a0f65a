"""What starts, watches and ends the processes of a serving system: of the demo, the tests and the lab.

>>> roles = [Role("prefill", ...), Role("router", ..., after=("prefill",))]
>>> with RoleGraph(roles, {"": LocalNode()}, logs) as graph:   # RoleError: what did not come up, its log
...     graph.dead()                                           # names of roles that have ended since

- `role`: a role: its command, environment, folder and ports, when it is ready, and what has to be ready
  before.
- `graph`: starts roles in their order, each as soon as what it waits for is ready, and ends them in
  reverse.
- `node`: where a role runs: this host, or a network namespace of it. Others are the lab's.
- `processes`, `keeper`: one process, and the process between it and us that ends it however we end.
- `ports`: which are free, and who has those that are not.
- `hosts`, `relay`: two network namespaces as two hosts, with a rate and a delay between them.
"""

from kvik.roles.graph import RoleError, RoleGraph
from kvik.roles.node import LocalNode, Node
from kvik.roles.role import HttpReady, LineReady, PortReady, Readiness, Role

__all__ = [
    "HttpReady", "LineReady", "LocalNode", "Node", "PortReady", "Readiness", "Role", "RoleError", "RoleGraph",
]  # fmt: skip
