"""Where the compiles of a matrix run: on this machine, or on the workers of a dask cluster.

`executors` is the interface, three functions, and the choice by name; each executor is a module.
"""
