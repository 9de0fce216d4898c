"""Prepared GPU calls against a driver that notes what it is asked for: no GPU is needed."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_cuda import COMPILER, FakeDriver

from convgrad import _native

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(built: FakeDriver) -> Iterator[FakeDriver]:
    built.lines()
    yield built
    built.fail("", 0)


def kernel(driver: FakeDriver, name: str, parameters: int, **needs: Any) -> Any:
    driver.kernel_parameters(name, parameters)
    return _native.GpuKernel(name, b"machine code", **{"threads": 128, "shared_bytes": 0, **needs})


def two_launches(driver: FakeDriver, **more: Any) -> Any:
    """x (slot 0) -> y (slot 1) through the workspace."""
    call = driver.call(2, **more)
    call.add_launch(kernel(driver, "split", 3), (5, 2, 1))
    call.add_pointer(0, 32)
    call.add_scalar(struct.pack("q", 77))
    call.add_pointer(2, 512)
    call.add_launch(kernel(driver, "add", 2, threads=256, shared_bytes=64), (9, 1, 1))
    call.add_pointer(2, 512)
    call.add_pointer(1, 0)
    call.workspace_bytes = 4096
    return call


def launched(name: str, grid: str, block: int, shared: int, stream: int, arguments: str) -> str:
    return f"launch {name} grid {grid} block {block} shared {shared} stream {stream} context 100 with {arguments}"


def test_addresses_streams_and_order(driver: FakeDriver) -> None:
    call = two_launches(driver)
    for addresses, stream, workspace in (([1000, 5000], 7, 8192), ((1000, 9000), 7, 8192), ([3000, 9000], 3, 16384)):
        call.run(addresses, stream, workspace)
        x, y = addresses
        assert driver.launches() == [
            launched("split", "5 2 1", 128, 0, stream, f"{x + 32} 77 {workspace + 512}"),
            launched("add", "9 1 1", 256, 64, stream, f"{workspace + 512} {y}")]


def test_kernels_are_loaded_once_and_large_ones_ask_for_shared_memory(driver: FakeDriver) -> None:
    large = kernel(driver, "large", 0, shared_bytes=200 * 1024)
    for _ in range(2):
        call = driver.call(0)
        call.add_launch(large, (1, 1, 1))
        call.run([])
        call.run([])
    lines = driver.lines()
    assert lines.count("load large") == 1
    assert lines.count(f"set large 8={227 * 1024 - 1024}") == 1, "all that is not static"


def test_clusters_and_early_starts_are_launch_attributes(driver: FakeDriver) -> None:
    call = driver.call(0)
    call.add_launch(kernel(driver, "cluster", 0, cluster=2), (3, 1, 1))
    call.add_launch(kernel(driver, "early", 0, pdl=True, cooperative=True), (3, 1, 1))
    call.add_launch(kernel(driver, "wide", 0, cluster=16), (1, 1, 1))
    call.run([])
    lines = driver.lines()
    cluster, early, wide = [line for line in lines if line.startswith("launch")]
    assert "grid 6 1 1" in cluster and "attribute 4:2 attribute 5:1" in cluster
    assert "grid 3 1 1" in early and "attribute 6:1 attribute 2:1" in early
    assert "grid 16 1 1" in wide and "set wide 14=1" in lines


def test_tensor_maps_are_encoded_once_and_moved(driver: FakeDriver) -> None:
    call = driver.call(1)
    call.add_launch(kernel(driver, "copy", 3), (1, 1, 1))
    call.add_scalar(struct.pack("i", 5))
    call.add_tensor_map(0, 256, type=9, extents=[64, 14, 3], strides=[128, 1792], box=[64, 7, 1], steps=[1, 2, 1],
                        swizzle=3, fill=1)
    call.add_pointer(0, 8)
    call.run([4096], 1)
    assert [line for line in driver.lines() if line.startswith("encode")] == [
        "encode 4352 type 9 extents 64,14,3 strides 128,1792 box 64,7,1 steps 1,2,1 modes 0321"]
    for address in (8192, 8192, 4096):
        call.run([address], 1)
        lines = driver.lines()
        assert not any(line.startswith("encode") for line in lines)
        assert [line.partition(" with ")[2] for line in lines if line.startswith("launch")] == [
            f"5 map@{address + 256} {address + 8}"]


def test_tensor_maps_of_many_addresses(driver: FakeDriver) -> None:
    call = driver.call(2)
    call.add_launch(kernel(driver, "copy", 2), (1, 1, 1))
    for slot in range(2):
        call.add_tensor_map(slot, 0, type=9, extents=[8], strides=[], box=[8], steps=[1], swizzle=0, fill=0)
    driver.lines()
    for number in (*range(30), *range(0, 30, 3), 29, 29, 28):
        first, second = 4096 + 64 * number, 8192 * (number + 1)
        call.run([first, second])
        assert driver.launches()[0].endswith(f"map@{first} map@{second}")


def test_zeros(driver: FakeDriver) -> None:
    call = driver.call(1)
    call.add_zeros(0, 16, 400)
    call.run([1000], 9)
    assert driver.lines()[-2:] == ["memset 1016 value 0 bytes 400 stream 9", "context 0"]


def test_a_device_of_its_own_and_the_callers_context_back(driver: FakeDriver) -> None:
    call = driver.call(0, device=3)
    call.add_launch(kernel(driver, "here", 0), (1, 1, 1))
    call.run([])
    lines = driver.lines()
    assert lines[0] == "context 103" and lines[-1] == "context 0" and "context 103" in lines[-2]


def test_a_failed_launch_names_kernel_and_problem(driver: FakeDriver) -> None:
    call = two_launches(driver, problem="input_grad bf16 n1")
    driver.fail("cuLaunchKernelEx", 700, after=1)
    with pytest.raises(RuntimeError, match="launch of kernel add of 'input_grad bf16 n1': CUDA error 700, an illegal"):
        call.run([1000, 5000], 7, 8192)
    assert driver.lines()[-1] == "context 0", "the caller's context is current again"
    call.run([1000, 5000], 7, 8192)
    assert len(driver.launches()) == 2, "a later call is made in full"


@pytest.mark.parametrize("function", ["cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"])
def test_a_refused_address_leaves_the_call_usable(driver: FakeDriver, function: str) -> None:
    call = driver.call(1)
    call.add_launch(kernel(driver, "copy", 1), (1, 1, 1))
    call.add_tensor_map(0, 0, type=9, extents=[8], strides=[], box=[8], steps=[1], swizzle=0, fill=0)
    if function == "cuTensorMapReplaceAddress":
        call.run([4096])
        driver.lines()
    driver.fail(function, 1)
    with pytest.raises(RuntimeError, match="tensor map at address 8192 for kernel copy of 'the problem': CUDA error 1, "
                                           "unknown"):
        call.run([8192])
    assert not driver.launches()
    call.run([8192])
    assert driver.launches()[0].endswith("map@8192")


def test_kernels_that_do_not_fit(driver: FakeDriver) -> None:
    for needs, message in (({"shared_bytes": 300 * 1024}, "needs 307200 bytes of shared memory, but device 0 has"),
                           ({"threads": 1024}, "needs blocks of 1024 threads, but its registers allow 512")):
        call = driver.call(0)
        call.add_launch(kernel(driver, "big", 0, **needs), (1, 1, 1))
        with pytest.raises(_native.OutOfResources, match=f"kernel big {message}"):
            call.run([])
    driver.fail("cuModuleLoadData", 700)
    call = driver.call(0)
    call.add_launch(kernel(driver, "torn", 0), (1, 1, 1))
    with pytest.raises(RuntimeError, match="loading kernel torn: CUDA error 700"):
        call.run([])


def test_arguments_are_checked(driver: FakeDriver) -> None:
    call = two_launches(driver)
    with pytest.raises(ValueError, match="2 operands and results, got 3"):
        call.run([1, 2, 3], 0, 1)
    with pytest.raises(TypeError, match="a list or a tuple"):
        call.run({1: 2}, 0, 1)
    with pytest.raises(ValueError, match="address of 4096 bytes"):
        call.run([1, 2])
    with pytest.raises(TypeError):
        call.run([1, "2"], 0, 1)
    with pytest.raises(IndexError, match="slot 3 is none of 0 to 2"):
        call.add_pointer(3, 0)
    with pytest.raises(RuntimeError, match="must follow the launch"):
        driver.call(1).add_pointer(0, 0)
    with pytest.raises(ValueError, match="a stride for each but the narrowest"):
        call.add_tensor_map(0, 0, type=9, extents=[8], strides=[16], box=[8], steps=[1], swizzle=0, fill=0)
    assert not driver.lines()


@pytest.mark.parametrize(("path", "message"), [("libnothing.so.7", "the CUDA driver is not available"),
                                               ("libc.so.6", "libc.so.6 has no function cuGetErrorString")])
def test_a_driver_that_is_missing_or_too_old(path: str, message: str) -> None:
    call = _native.GpuCall("p", 0, 0, path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            call.run([])


def test_threads_take_turns(driver: FakeDriver) -> None:
    """Each launch has the addresses and the stream of one caller."""
    call = two_launches(driver)

    def many(caller: int) -> None:
        for _ in range(200):
            call.run([1000 * caller, 1000 * caller + 1], caller, 1000 * caller + 2)

    threads = [threading.Thread(target=many, args=(caller,)) for caller in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = driver.launches()
    for first, second in zip(launches[::2], launches[1::2]):
        caller = int(first.split(" stream ")[1].split()[0])
        assert first == launched("split", "5 2 1", 128, 0, caller, f"{1000 * caller + 32} 77 {1000 * caller + 514}")
        assert second == launched("add", "9 1 1", 256, 64, caller, f"{1000 * caller + 514} {1000 * caller + 1}")
    assert len(launches) == 4 * 200 * 2


def test_c_code_runs_a_call_by_its_handle(driver: FakeDriver) -> None:
    address_of = ctypes.pythonapi.PyCapsule_GetPointer
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
                           ctypes.c_char_p, ctypes.c_size_t)(address_of(_native.run_prepared, b"convgrad.run_prepared"))
    call = two_launches(driver)
    addresses, message = (ctypes.c_void_p * 2)(1000, 5000), ctypes.create_string_buffer(24)
    assert run(call.handle, addresses, 7, 8192, message, len(message)) == 0
    assert driver.launches()[1] == launched("add", "9 1 1", 256, 64, 7, "8704 5000")
    driver.fail("cuLaunchKernelEx", 700)
    assert run(call.handle, addresses, 7, 8192, message, len(message)) == 1
    assert message.value == b"launch of kernel split "
