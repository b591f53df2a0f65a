"""Whose KV a rank follows an offer to. Tickets come through clients, and have the addresses to ask at."""

from __future__ import annotations

import ipaddress

from kvik.handover.native import Native, Ticket


def read_ticket(native: Native, text: str, proven: bool) -> Ticket:
    """A ticket of an offer. proven: whether peers prove to this rank's engine, who they are (a secret, TLS).

    Raises `KvikError` for what is no ticket, and `SecretRequired` for one that leads beyond this host where
    nothing is proven: anybody could listen there, and give whoever asks any KV under the right name.
    """
    ticket = native.Ticket(text)
    beyond = [] if proven else [address for address in ticket.addresses if not _is_here(address)]
    if beyond:
        raise native.SecretRequired(
            f"the offer leads to {beyond[0]}, beyond this host, and this server has neither a `secret` "
            "(KVIK_SECRET) nor `tls` by which to know who answers there: give both servers the same"
        )
    return ticket


def _is_here(address: str) -> bool:
    host, _, _ = address.rpartition(":")
    return ipaddress.ip_address(host.strip("[]")).is_loopback
