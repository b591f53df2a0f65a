"""The machine as a transfer sees it: what its PCIe links, NICs and limits allow, and what a fault costs.

``tree`` reads paths of a live or a recorded machine, ``reader`` notes what is missing; ``pci`` and ``host``
read the facts, ``examining`` makes a `Machine` (``model``) of them. ``links`` says what paths carry, ``cost``
what that means for a serving engine, ``ranking`` and the two modules of rules what is wrong; ``maps`` gives
NICs to ranks, and ``near`` those of a GPU to a rank, by an engine's names. ``saving`` records a machine
without what names it, and ``summary`` says it in a few lines for comparisons; ``comparing``, ``show`` and
``page`` show, ``measure`` measures."""

from kvik.doctor.cost import Traffic
from kvik.doctor.examining import examine
from kvik.doctor.maps import nics_for_ranks
from kvik.doctor.model import Finding, Machine
from kvik.doctor.ranking import findings
from kvik.doctor.tree import RecordingError, Tree, Unread, live, load

__all__ = [
    "Finding",
    "Machine",
    "RecordingError",
    "Traffic",
    "Tree",
    "Unread",
    "examine",
    "findings",
    "live",
    "load",
    "nics_for_ranks",
]
