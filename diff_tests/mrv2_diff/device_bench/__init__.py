"""Whole engines side by side: each runner in a process of its own, all of them on one device.

The parent (`bench`) starts the processes, has them run blocks of steps by turns, and judges; it
imports neither torch nor vLLM. A child (`child`) holds one engine and does what it is told.
"""
