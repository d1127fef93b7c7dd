"""Bridges to other libraries: each is a module that is imported by name and needs that library."""
