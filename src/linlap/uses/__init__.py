"""How the weights of a network enter its outputs, seen while it runs.

A weight matrix of any spelling (linear, convolution, embedding, attention) enters as a sum of outer products of what goes in
and the derivative of what comes out; scales and shifts enter number by number. No layer is recognised by its name or its
type: operations are watched as they are called, and a weight counts as understood only if its recorded uses reproduce its
gradient on a few examples, example by example.

    outer       rows of outer products, and what sums of them
    operations  what each operation makes of its weights
    recorder    watches a forward pass
    coverage    which weights are understood, certified on a few examples
"""
