"""One model for every family, and the directory it lives in.

Shapes are in names: T tokens of the flat batch, D hidden, F expert hidden, G gate and up together (2F), E experts,
K experts per token, H heads, N key/value heads, C head size, X value size, L layers, M tokens a sequence remembers,
S sequences, V vocabulary, P cache pages, R rotary pairs, A assignments of a token to an expert, I and O the inputs and
outputs of a matrix.
"""
