"""The training text: parts of Python's library (PSF-2.0) and text written for this project (Apache-2.0)."""
