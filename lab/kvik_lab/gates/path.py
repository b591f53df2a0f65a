"""V4: requests went the way that is stated."""

from __future__ import annotations

from kvik_lab.gates.case import Case, first_total, invalid, passed, suspect, total, unchecked, worst
from kvik_lab.records import Finding, Request, Role

_ANSWERED = ("vllm:request_success_total", "vllm:e2e_request_latency_seconds_count")
_ROUTED = "kvik_router_requests_total"


def v4(case: Case) -> Finding:
    """The client talked to the stated role, and every engine of the way answered as many requests."""
    if case.stated.entry is None and not case.disaggregated:
        return unchecked("V4", "no entry is stated, and nothing was to be handed over")
    if not case.record.requests or not case.record.roles:
        return unchecked("V4", "the record has no requests, or no roles")
    found = [one for one in (_address(case), _through(case), *_engines(case)) if one is not None]
    return worst(found) if found else unchecked("V4", "nothing tells the requests' way")


def _address(case: Case) -> Finding | None:
    """The client's address is that of the stated role."""
    entry, client = case.stated.entry, case.record.client
    if entry is None or client is None or client.target is None:
        return None
    target = client.target
    role = next((one for one in case.record.roles if one.name == entry), None)
    if role is None or role.url is None:
        return suspect("V4", f"there is no address of the role {entry!r}", "name one of the roles as entry")
    if _same(role.url, target):
        return passed("V4", f"the client talked to {entry} at {target}")
    other = next((one for one in case.record.roles if one.url and _same(one.url, target)), None)
    who = f"{other.name} ({other.kind})" if other else "none of the run's roles"
    return invalid(
        "V4",
        f"the client talked to {target}, which is {who}, and not to {entry} at {role.url}",
        f"give the load the address of {entry}",
    )


def _same(one: str, two: str) -> bool:
    def plain(url: str) -> str:
        return url.rstrip("/").removesuffix("/v1").replace("://localhost", "://127.0.0.1")

    return plain(one) == plain(two)


def _through(case: Case) -> Finding | None:
    """The router before the engines saw the requests."""
    router = next((one for one in case.record.role("router") if one.name == case.stated.entry), None)
    if router is None:
        return None
    asked, routed = len(case.record.requests), total([router], _ROUTED)
    if routed is None:
        return _by_header(router, case.answered)
    if routed >= asked:
        return passed("V4", f"{router.name} counted {routed:.0f} requests", routed, asked)
    return invalid(
        "V4",
        f"{router.name} counted {routed:.0f} of {asked} requests",
        "give the load the router's address, and send nothing past it",
        routed,
        asked,
    )


def _by_header(router: Role, answered: tuple[Request, ...]) -> Finding:
    """A router that counts nothing may say in its answers that it was there."""
    seen = sum("route" in request.timing for request in answered)
    if seen == len(answered):
        return passed("V4", f"all {seen} answers have the router's Server-Timing")
    return suspect(
        "V4",
        f"{router.name} counts no requests, and {seen} of {len(answered)} answers have its Server-Timing",
        "record the router's /metrics before and after the run",
    )


def _engines(case: Case) -> list[Finding]:
    """Prefill and decode engines each answered every request."""
    kinds = ("prefill", "decode") if case.disaggregated else ("unified",)
    if not case.answered:
        return []
    return [_answers(roles, kind, len(case.answered)) for kind in kinds if (roles := case.record.role(kind))]


def _answers(roles: tuple[Role, ...], kind: str, wanted: int) -> Finding:
    counted = first_total(roles, _ANSWERED)
    names = ", ".join(role.name for role in roles)
    if counted is None:
        return suspect(
            "V4",
            f"{names} does not count its answers, so that requests went through it is not shown",
            "record its /metrics before and after the run",
        )
    if counted >= wanted:
        return passed("V4", f"{names} answered {counted:.0f} requests", counted, wanted)
    what = "none" if counted == 0 else f"{counted:.0f}"
    return invalid(
        "V4",
        f"{names} answered {what} of {wanted} requests, which are to go through {kind}",
        "send the requests to the router, and see that it was given every engine",
        counted,
        wanted,
    )
