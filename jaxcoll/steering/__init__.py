"""What the leader thinks with: policies, the sets of a running job, the run log. Knows neither JAX nor the library.

It runs in a process of its own (`brain`), beside the training of process 0: the search for a better table would else
take the interpreter's lock from the training's thread.
"""
