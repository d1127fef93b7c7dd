"""Tests of whole runs. They share programs, and runs to compare with (`conftest.py`)."""
