"""DDTREE for SGLang: speculative decoding with draft trees, as a plugin on the stock wheel.

This module stays free of imports: on a CPU engine it is loaded at interpreter start (see
``cpu/bootstrap.py``).
"""

__version__ = "0.1.0"
