"""Run by a free-threaded interpreter (test_free_threaded.py): many threads, one Launch, and what the driver was given.

Every thread launches a problem of its own. A launch is torn if its parameters do not belong to one problem. Prints the
number of launches and of torn ones, and whether the interpreter lock is still off. Arguments: the stand-in driver.
"""

import struct
import sys
import threading

from fa4_kernels import _launcher, plan

from tests.runtime.fake import FakeDriver, fake_cubin, forward_plan, param_bytes, read_map
from tests.runtime.tensors import FLOAT32, AttributeTensor

NUM_THREADS, CALLS, ROUNDS = 4, 16, 1500  # the stand-in driver keeps 64 launches
ALIGN = {"q": 16, "k": 16, "v": 16, "out": 16, "lse": 4}


def arguments(number):
    """Problem `number`: 100 + number rows, pointers and head counts of its own."""
    rows, heads = 100 + number, 1 + number
    shapes = dict.fromkeys(("q", "k", "v", "out"), (2, rows, heads, 64)) | {"lse": (2, heads, rows)}
    pointer = 0x10000 * (number + 1)
    tensors = [AttributeTensor(shape, pointer=pointer) for shape in shapes.values()]
    tensors[-1].dtype = FLOAT32
    return [*tensors, 0.125, 0, 0, number]


def is_whole(launch):
    """Map, pointers, scalars and grid all tell of the problem that the scalar names."""
    data = param_bytes(launch)
    out, lse, _, _, _, number, rows, rows_k = struct.unpack("<QQf5i", data[128:])
    pointer = 0x10000 * (number + 1)
    described = read_map(data[:128])
    return (
        out == lse == described["address"] == pointer
        and rows == rows_k == described["dims"][1] == 100 + number
        and list(launch.grid) == [(rows + 127) // 128, 1 + number, 2]
    )


def main(driver_path):
    fake = FakeDriver(driver_path)
    fake.reset()
    driver = _launcher.Driver(driver_path)
    bound = _launcher.Plan(plan.encode_plan(forward_plan("kernel"), ALIGN))
    launch = _launcher.Launch(driver, bound, driver.load(fake_cubin(kernel=(128, 40))), 0, lambda ordinal: 7, 2)
    start = threading.Barrier(NUM_THREADS + 1)
    end = threading.Barrier(NUM_THREADS + 1)

    def work(number):
        given = arguments(number)
        for _ in range(ROUNDS):
            start.wait()
            for _ in range(CALLS):
                launch.run(*given)
            end.wait()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    launches = torn = 0
    for _ in range(ROUNDS):
        fake.reset_launches()
        start.wait()
        end.wait()
        found = fake.launches
        launches += len(found)
        torn += sum(not is_whole(one) for one in found)
    print(launches, torn, sys._is_gil_enabled())


main(sys.argv[1])
