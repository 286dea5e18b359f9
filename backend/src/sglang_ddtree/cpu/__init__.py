"""SGLang's CPU engine for DDTREE and DFLASH, for demonstrations and tests without an accelerator.

Active only with ``SGLANG_USE_CPU_ENGINE=1``. SGLang has a CPU engine, but keeps its speculative decoding of
the DFLASH family to accelerators, and its CPU kernels are not in the released wheel. What is missing is
supplied here:

- ``bootstrap``: at interpreter start, stand-ins for modules that cannot load (``sgl_kernel``, torchvision's
  operators);
- ``sgl_kernel``: the few CPU kernels that are called, in torch;
- ``attention``: tree verify for the ``torch_native`` attention backend;
- ``hooks``: device checks and GPU-only calls on the way;
- ``boot``: a faster start.

This module imports nothing: ``bootstrap`` is loaded before there is a torch to import.
"""
