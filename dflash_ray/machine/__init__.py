"""What is known about this machine and this process: versions, CPU, GPUs, memory, watts. Also sets the number of threads.

May import: nothing.
"""
