"""The start of a script in which kernels are compiled for a GPU that is not here: launches are kept in `calls`."""

DRY = """
import sys
sys.path.insert(0, "tests")
import torch, triton
from gate import Driver, target_of

calls = []

class Dry(Driver):
    def launcher_cls(self, src, metadata):
        return lambda *args: calls.append(args)
    def load_binary(self, *_):
        return 1, 2, 3, 0, 1024
    def unload_module(self, *_):
        pass

torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda device: 0
triton.runtime.driver.set_active(Dry(target_of("90")))
"""
