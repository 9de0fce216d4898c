"""Give AMX back to a peer that cannot see it.

Some virtual machines announce AMX (CPUID leaf 7) and enable its registers (XCR0), but hide leaf 0x1D, which lists the
tile palettes. oneDNN then configures palette 0 and its first bf16 product dies with an illegal instruction. To compare
with a crash, or with a peer without AMX, would flatter us: so, inside the peer's own process, the cached answers of
oneDNN's leaf 0x1D queries are set to what every AMX processor so far answers. Where that cannot be done, AMX is off for
the peer, and the results say so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import subprocess
from pathlib import Path

# push rbx; mov eax,edi; mov ecx,esi; mov r8,rdx; cpuid; store eax, ebx, ecx, edx at [r8]; pop rbx; ret
CPUID_CODE = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3")
# mov ecx,0; xgetbv; ret  (the low half of XCR0 in eax)
XGETBV_CODE = bytes.fromhex("b900000000 0f01d0 c3")
XCR0_TILES = (1 << 17) | (1 << 18)
# What leaf 0x1D says on processors with AMX: palette 1 has 8 tiles of 16 rows of 64 bytes.
PALETTES = {"get_max_tiles": 8, "get_max_column_bytes": 64, "get_max_rows": 16}
PREFIX = "dnnl::impl::cpu::x64::amx::"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"


def run_code(code: bytes, *arguments: object) -> int:
    """Call a few bytes of x86-64 machine code as a C function and return its 32-bit result."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_uint32)(address)(*arguments))


def cpuid(leaf: int, subleaf: int = 0) -> tuple[int, int, int, int]:
    """Return eax, ebx, ecx, edx."""
    registers = (ctypes.c_uint32 * 4)()
    run_code(CPUID_CODE, ctypes.c_uint32(leaf), ctypes.c_uint32(subleaf), ctypes.byref(registers))
    return registers[0], registers[1], registers[2], registers[3]


def palettes_hidden() -> bool:
    """Whether this machine has AMX by leaf 7 and XCR0 but hides the palettes of leaf 0x1D."""
    if platform.machine() != "x86_64" or cpuid(0)[0] < 7:
        return False
    amx_tile, os_saves_registers = cpuid(7)[3] >> 24 & 1, cpuid(1)[2] >> 27 & 1
    if not (amx_tile and os_saves_registers) or run_code(XGETBV_CODE) & XCR0_TILES != XCR0_TILES:
        return False
    return cpuid(0)[0] < 0x1D or cpuid(0x1D, 0)[0] == 0


def library_base(library: str) -> int:
    """Address at which a shared library of this process is loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if fields[-1].endswith("/" + library):
            return int(fields[0].split("-")[0], 16) - int(fields[2], 16)
    raise LookupError(f"{library} is not loaded")


def palette_symbols(path: str) -> dict[str, int]:
    """Offsets of oneDNN's cached palette answers and their guards, by demangled name (needs `nm`)."""
    listing = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(rf"^([0-9a-f]+) \w ((?:guard variable for )?{PREFIX}get_max_\w+\([^)]*\)::\w+)$", listing, re.M)
    return {name: int(offset, 16) for offset, name in found}


kept_alive: list[object] = []  # the memory to which oneDNN's vectors point from now on


def show_palettes(folder: str) -> None:
    """Write the palettes into the function-local statics of the oneDNN inside libtorch_cpu.so; torch is imported."""
    library = "libtorch_cpu.so"
    symbols = palette_symbols(os.path.join(folder, "lib", library))
    base = library_base(library)
    names = {"get_max_palette()::EAX"} | {f"{query}(int)::palettes" for query in PALETTES}
    missing = [name for name in names for prefix in ("", "guard variable for ")
               if f"{prefix}{PREFIX}{name}" not in symbols]
    if missing:
        raise LookupError(f"{library} has no symbol {missing[0]}")

    def place(name: str) -> int:
        return base + symbols[name]

    ctypes.c_uint32.from_address(place(PREFIX + "get_max_palette()::EAX")).value = 1
    for query, answer in PALETTES.items():  # each a std::vector<int> of one element: begin, end, end of storage
        storage = (ctypes.c_int * 1)(answer)
        kept_alive.append(storage)
        begin = ctypes.addressof(storage)
        for word, value in enumerate((begin, begin + 4, begin + 4)):
            ctypes.c_uint64.from_address(place(f"{PREFIX}{query}(int)::palettes") + 8 * word).value = value
    for name in names:
        ctypes.c_uint8.from_address(place(f"guard variable for {PREFIX}{name}")).value = 1


def protect_peer(folder: str) -> str:
    """Make AMX usable or switch it off for the torch of this process; return a sentence for the results, or ""."""
    try:
        if not palettes_hidden():
            return ""
        show_palettes(folder)
        return "AMX given back (CPUID leaf 0x1D is hidden here)"
    except (OSError, LookupError, ValueError, subprocess.CalledProcessError) as error:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ISA_WITHOUT_AMX  # read by oneDNN at its first primitive
        return f"without AMX (CPUID leaf 0x1D is hidden here, and: {error})"
