"""Bridges to other libraries, each of which is a module that is imported by name and needs that library."""
