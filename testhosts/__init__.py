"""Throw-away Debian hosts whose PID 1 is a real systemd, for the demo and for molecule.

Standard library only: it runs with the system's Python before any virtual environment exists.
"""
