"""Builds the aclnn library for C and C++ programs on first use, and knows what a compiler needs to use it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
INCLUDE = PACKAGE / "include"
SOURCES = Path(__file__).parent / "library"
NAME = "convgrad_aclnn"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")


class NoCompiler(RuntimeError):
    """There is no C++ compiler, or it fails."""


def compiler() -> str:
    """The C++ compiler: CXX, or the first of c++, g++ and clang++ on the path."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NoCompiler("no C++ compiler was found: install g++ or clang++, or name one in CXX")


def cache_folder() -> Path:
    """Where built libraries are kept; CONVGRAD_CACHE or XDG_CACHE_HOME move it."""
    named = os.environ.get("CONVGRAD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "convgrad"


def library_folder() -> Path:
    """The folder with the shared library, built there now if it is not; raises NoCompiler with the reason."""
    program = compiler()
    files = [*sorted(SOURCES.iterdir()), *sorted(INCLUDE.rglob("*.h"))]
    digest = hashlib.sha256("\0".join([program, sys.executable, str(PACKAGE), *FLAGS]).encode())
    for path in files:
        digest.update(path.read_bytes())
    folder = cache_folder() / f"aclnn-{digest.hexdigest()[:16]}"
    library = folder / f"lib{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # renamed when whole: others may build it too
            built = Path(scratch) / library.name
            command = [program, *FLAGS, f"-I{INCLUDE}", f'-DCONVGRAD_PYTHON="{sys.executable}"',
                       f'-DCONVGRAD_PATH="{PACKAGE.parent}"', "-o", str(built),
                       *map(str, sorted(SOURCES.glob("*.cpp")))]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise NoCompiler(f"{program} could not build the aclnn library:\n{done.stderr}")
            built.replace(library)
    return folder


def compile_flags() -> list[str]:
    """What a compiler needs to find the headers, those of Ascend C kernels among them."""
    return [f"-I{INCLUDE}"]


def link_flags() -> list[str]:
    """What a linker needs; builds the library if need be."""
    folder = library_folder()
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{NAME}"]


def build_program(source: Path, program: Path, *extra: str) -> None:
    """Compile a C or C++ program against the headers and the library; raises NoCompiler with the compiler's words."""
    language = ["-x", "c"] if source.suffix == ".c" else ["-std=c++17"]
    driver = compiler()
    command = [driver, *language, *compile_flags(), str(source), *(["-x", "none"] if source.suffix == ".c" else []),
               *link_flags(), *extra, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise NoCompiler(f"{driver} could not compile {source}")
