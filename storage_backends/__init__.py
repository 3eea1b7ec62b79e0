"""Storage backends: named byte objects under a URL, and what each store guarantees of them.

`abc` is the interface, `registry` finds the backend of a URL, `testing` has the conformance suite that
every backend runs, third-party ones included.
"""
