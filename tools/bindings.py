"""Makes the Rust declarations of C interfaces again that kvik-host calls at run time, from the C headers.

    python3 tools/bindings.py            # all of them
    python3 tools/bindings.py verbs      # one

Whoever changes what is taken from a header, or takes another version of it, runs this and commits the files.
It needs `cargo install bindgen-cli --version 0.71.1`, a libclang (`LIBCLANG_PATH` names its folder; that of
PyPI's package `libclang` will do) and the headers of Debian 12: libibverbs-dev 44.0 and libfabric-dev 1.17.0.

bindgen declares the structures with all that they contain, and checks their sizes and offsets when kvik is
compiled. Two things are added to that: a table of the functions that are looked up in the library, each at
the version of its symbol for which the header stands; and of the tables that the library's objects bring, the
functions that kvik calls are plain ones, which are there in each library that kvik takes.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "crates" / "kvik-host" / "src"
# Types of the C library that have another layout on other machines; the crate `libc` knows each.
OF_LIBC = ("pthread_mutex_t", "pthread_cond_t", "iovec")
# Why a structure may be made of zeros, which `_check_defaults` has seen.
ZEROED = "\n// SAFETY: plain numbers, pointers, and functions that may be missing: all of it may be zero.\n"
WITHIN_OF_LIBC = ("__atomic_wide_counter.*", "__pthread.*")


@dataclass(frozen=True)
class Interface:
    """One library's interface, and what of it kvik uses."""

    origin: str
    includes: Sequence[str]
    # Patterns of types and of enumerators, for bindgen; what they contain comes along.
    types: Sequence[str]
    # Macros, by the C type that they are to have.
    macros: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Types that kvik declares itself: the name in C, and its declaration in Rust.
    own: Mapping[str, str] = field(default_factory=dict)
    # Fields of tables of functions that are always there.
    called: Sequence[str] = ()
    # Functions to look up, by the version of their symbol; a `?` in front: older libraries have none.
    symbols: Mapping[str, Sequence[str]] = field(default_factory=dict)
    prefix: str = ""
    # A structure of functions that a library gives: its name in C, and which of them may be missing.
    given: str = ""
    missing: Sequence[str] = ()
    folders: Sequence[Path] = ()

    def functions(self) -> list[str]:
        """The names of the functions to look up."""
        return [name.removeprefix("?") for names in self.symbols.values() for name in names]


INTERFACES = {
    "verbs": Interface(
        origin="infiniband/verbs.h of rdma-core 44.0 (Debian's libibverbs-dev)",
        includes=["infiniband/verbs.h"],
        types=[
            "ibv_(context|device_attr|port_attr|gid_entry|qp_init_attr|qp_attr|recv_wr|send_wr|wc|async_event)",
            "ibv_(qp_attr_mask|access_flags|send_flags|gid_type)",
        ],
        macros={"uint8_t": ["IBV_LINK_LAYER_ETHERNET"]},
        # A union, which kvik takes for bytes everywhere.
        own={
            "ibv_gid": "#[repr(C, align(8))] #[derive(Debug, Clone, Copy, Default)]"
            "pub struct ibv_gid(pub [u8; 16]);",
        },
        called=["poll_cq", "req_notify_cq", "post_send", "post_recv"],
        symbols={
            "IBVERBS_1.1": [
                "ibv_get_device_list",
                "ibv_free_device_list",
                "ibv_get_device_name",
                "ibv_open_device",
                "ibv_close_device",
                "ibv_query_device",
                "ibv_query_port",
                "ibv_query_gid",
                "ibv_alloc_pd",
                "ibv_dealloc_pd",
                "ibv_reg_mr",
                "ibv_dereg_mr",
                "ibv_create_cq",
                "ibv_resize_cq",
                "ibv_destroy_cq",
                "ibv_get_cq_event",
                "ibv_ack_cq_events",
                "ibv_create_qp",
                "ibv_modify_qp",
                "ibv_query_qp",
                "ibv_destroy_qp",
                "ibv_get_async_event",
                "ibv_ack_async_event",
                "ibv_wc_status_str",
                "ibv_event_type_str",
            ],
            "IBVERBS_1.0": ["ibv_create_comp_channel", "ibv_destroy_comp_channel"],
            # Of rdma-core 32 and 34, and newer.
            "IBVERBS_1.11": ["?_ibv_query_gid_table"],
            "IBVERBS_1.12": ["?ibv_reg_dmabuf_mr"],
        },
        prefix="ibv_",
    ),
    "fabric": Interface(
        origin="rdma/fabric.h and its neighbours of libfabric 1.17.0 (Debian's libfabric-dev)",
        includes=[f"rdma/{name}.h" for name in ("fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_rma")],
        types=[
            "fi_(info|av_attr|cq_attr|cq_entry|cq_err_entry|msg_rma|context2|ops_mr|ops_cm|ops_rma|ops_cq|ops_av)",
            "fi_(ops_fabric|ops_domain|ops_ep|hmem_iface)",
            "fid_(fabric|domain|mr|av|cq|ep)",
        ],
        macros={
            "uint64_t": [
                *("FI_MSG", "FI_RMA", "FI_READ", "FI_WRITE", "FI_RECV", "FI_TRANSMIT", "FI_REMOTE_READ"),
                *("FI_REMOTE_WRITE", "FI_COMPLETION", "FI_DELIVERY_COMPLETE", "FI_HMEM", "FI_SOURCE"),
                *("FI_CONTEXT", "FI_CONTEXT2"),
            ],
            "int": [
                *("FI_MR_LOCAL", "FI_MR_VIRT_ADDR", "FI_MR_ALLOCATED", "FI_MR_PROV_KEY", "FI_MR_HMEM"),
                *("FI_GETWAIT", "FI_ENABLE", "FI_OPT_ENDPOINT"),
            ],
            "uint32_t": ["FI_SOCKADDR", "FI_SOCKADDR_IN", "FI_SOCKADDR_IN6"],
            "ssize_t": ["FI_EAGAIN", "FI_EAVAIL"],
        },
        own={"fi_mr_attr": "use super::newer::MrAttr as fi_mr_attr;"},
        called=[
            *(
                "close",
                "bind",
                "control",
                "domain",
                "trywait",
                "av_open",
                "cq_open",
                "endpoint",
                "reg",
                "regattr",
            ),
            *("insert", "remove", "read", "readerr", "strerror", "setopt", "getname", "readmsg", "writemsg"),
        ],
        symbols={
            "FABRIC_1.3": ["fi_getinfo", "fi_freeinfo", "fi_dupinfo"],
            "FABRIC_1.1": ["fi_fabric"],
            "FABRIC_1.0": ["fi_strerror", "fi_version"],
        },
        prefix="fi_",
    ),
    "plugin": Interface(
        origin="include/kvik/nic.h",
        includes=["kvik/nic.h"],
        types=["kvik_nic_.*"],
        macros={
            "uint32_t": [
                *(f"KVIK_NIC_{name}" for name in ("VERSION", "READ", "WRITE", "MEMORY_CUDA")),
                *(f"KVIK_NIC_DMABUF_{name}" for name in ("UNUSED", "WANTED", "NEEDED")),
            ],
            "size_t": [
                f"KVIK_NIC_{name}" for name in ("NAME", "DEVICE_NAME", "ADDRESS", "DEVICES", "PIECES")
            ],
            "int32_t": ["KVIK_NIC_OK", "KVIK_NIC_FULL", "KVIK_NIC_ALL"],
        },
        given="kvik_nic_plugin",
        missing=["is_up", "memories", "region_add_on"],
        folders=[ROOT / "include"],
    ),
}


def main(names: Sequence[str]) -> int:
    """Write the files of these interfaces; returns the exit status."""
    for name in names or INTERFACES:
        target = SOURCES / name / "abi.rs"
        target.write_text(_bindings(INTERFACES[name]), encoding="utf-8")
        rustfmt = ["rustfmt", "--edition", "2024", "--config-path", str(ROOT / "rustfmt.toml"), str(target)]
        subprocess.run(rustfmt, check=True)
        print(target.relative_to(ROOT))
    return 0


def _bindings(interface: Interface) -> str:
    """The text of one file, not yet formatted."""
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "wanted.h"
        lines = [f"#include <{name}>" for name in ("stdint.h", "sys/types.h", *interface.includes)]
        # bindgen gives a macro the smallest type that holds it, and a constant the one that it has in C.
        for kind, macros in interface.macros.items():
            lines += [f"static const {kind} wanted_{name} = {name};" for name in macros]
        header.write_text("\n".join(lines) + "\n", encoding="utf-8")
        made = subprocess.run(
            _command(interface, header), check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    made = made.replace("wanted_", "")
    for name in interface.called:
        pattern = rf"(pub {name} : ):: std :: option :: Option < (unsafe extern \"C\" fn .*?) > ,"
        made, count = re.subn(pattern, r"\1\2 ,", made)
        if count == 0:
            raise SystemExit(f"no table has the function {name}")
    _check_defaults(made)
    made = made.replace(
        "unsafe { :: std :: ptr :: write_bytes", f"{ZEROED} unsafe {{ :: std :: ptr :: write_bytes"
    )
    # Other machines have other types in the same structures, by the crate `libc`.
    made = made.replace("const _ : () = {", '#[cfg(target_arch = "x86_64")]\nconst _ : () = {')
    return "\n".join(
        [
            f"// @generated by tools/bindings.py with bindgen, from {interface.origin}.",
            "// Not to be changed by hand: change tools/bindings.py, and run it again.",
            "#![allow(non_camel_case_types, dead_code, missing_docs)]",
            "",
            *interface.own.values(),
            *(f"use libc::{name};" for name in OF_LIBC if re.search(rf"\b{name}\b", made)),
            *(["use crate::library::{Library, LibraryError};"] if interface.symbols else []),
            "",
            # Declared functions would be linked; kvik looks them up.
            re.sub(r'unsafe extern "C" \{.*?\}', "", made),
            _looked_up(interface, made) if interface.symbols else "",
            _given(interface, made) if interface.given else "",
        ]
    )


def _check_defaults(made: str) -> None:
    """Nothing that is made of zeros has a function in it that cannot be missing, also not within a field."""
    structures = dict(re.findall(r"pub (?:struct|union) (\w+) \{(.*?)\}", made))

    def has_function(name: str) -> bool:
        body = structures.get(name, "")
        plain = re.search(r": unsafe extern", body)
        return bool(plain) or any(
            has_function(kind) for kind in re.findall(r": (\w+) ,", body) if kind != name
        )

    wrong = [name for name in re.findall(r"impl Default for (\w+)", made) if has_function(name)]
    if wrong:
        raise SystemExit(f"{', '.join(wrong)}: has a default, and functions that are always there")


def _command(interface: Interface, header: Path) -> list[str]:
    options = ["--formatter", "none", "--no-doc-comments", "--no-prepend-enum-name", "--rust-target", "1.82"]
    options += ["--ctypes-prefix", "std::ffi", "--disable-header-comment"]
    # Not of what has functions in it that are always there: zero is none of them.
    options += ["--with-derive-default", "--no-default", ".*_(context|ops|fid)(_.*)?|fid.*|.*_plugin|ibv_wq"]
    for pattern in interface.types:
        options += ["--allowlist-type", pattern]
    for name in interface.functions():
        options += ["--allowlist-function", name]
    options += ["--allowlist-var", "wanted_.*"]
    for name in [*interface.own, *OF_LIBC, *WITHIN_OF_LIBC]:
        options += ["--blocklist-type", name]
    # libclang's package has none of the compiler's own headers.
    gcc = subprocess.run(
        ["gcc", "-print-file-name=include"], check=True, capture_output=True, text=True
    ).stdout.strip()
    folders = [gcc, *map(str, interface.folders)]
    bindgen = os.environ.get("BINDGEN", "bindgen")
    return [bindgen, *options, str(header), "--", *(f"-I{folder}" for folder in folders)]


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _given(interface: Interface, made: str) -> str:
    """The functions of a structure that a library gives, those that must be there without `Option`."""
    found = re.search(rf"pub struct {interface.given} \{{(.*?)\}}", made)
    if found is None:
        raise SystemExit(f"the header has no structure {interface.given}")
    pattern = r"pub (\w+) : :: std :: option :: Option < (unsafe extern \"C\" fn .*?) > ,"
    fields, checks = [], []
    for name, kind in re.findall(pattern, found[1]):
        may = name in interface.missing
        fields.append(f"pub {name}: {f'Option<{kind}>' if may else kind},")
        checks.append(f"{name}: self.{name}{'' if may else f'.ok_or({chr(34)}{name}{chr(34)})?'},")
    return "\n".join(
        [
            "/// The functions of a table; those without `Option` are all there.",
            "#[derive(Clone, Copy)]",
            "pub struct Functions {",
            *fields,
            "}",
            f"impl {interface.given} {{",
            "/// # Errors",
            "/// The name of a function that is not there.",
            "pub fn functions(&self) -> Result<Functions, &'static str> {",
            "Ok(Functions {",
            *checks,
            "})",
            "}",
            "}",
        ]
    )


def _looked_up(interface: Interface, made: str) -> str:
    """The functions that are looked up in the library: a structure, and how it is filled."""
    fields, loads = [], []
    for version, names in interface.symbols.items():
        for wanted in names:
            name = wanted.removeprefix("?")
            found = re.search(rf"pub fn {name} \((.*?)\) (-> .*?)?;", made)
            if found is None:
                raise SystemExit(f"the header has no function {name}")
            kind = f'unsafe extern "C" fn({found[1]}) {found[2] or ""}'
            short = name.removeprefix("_").removeprefix(interface.prefix)
            optional = wanted != name
            fields.append(f"pub {short}: {f'Option<{kind}>' if optional else kind},")
            loads.append(f'{short}: library.function(c"{name}", c"{version}"){".ok()" if optional else "?"},')
    return "\n".join(
        [
            "/// The library's functions; all others are reached through the objects that it makes.",
            "#[derive(Clone, Copy, Debug)]",
            "pub struct Table {",
            *fields,
            "}",
            "impl Table {",
            "pub fn load(library: &Library) -> Result<Table, LibraryError> {",
            "// SAFETY: the types of the fields are those of the header for these versions of the symbols.",
            "unsafe { Ok(Table {",
            *loads,
            "}) }",
            "}",
            "}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
