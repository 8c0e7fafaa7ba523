"""The CPU kernels in C++: built on the machine where they run, for the processor they run on.

`src/` holds the sources (a plain C ABI, no torch headers: they compile in seconds), `build` compiles them
into a cache, `library` loads the result with ctypes, whose calls release the interpreter lock.
"""
