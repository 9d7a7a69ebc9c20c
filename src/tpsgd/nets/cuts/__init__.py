"""Where a model is cut into blocks.

split     from a model to blocks, with the words that choose where: blocks, split_points, no_split
leaves    the modules of nested `nn.Sequential`s, in the order in which data meets them
traced    those of any class, from the graph of its `forward`, cut where one activation crosses
sections  a part of a `forward` as a module
lists     a model that cannot be traced, cut along its list of layers
balance   how many layers each block has, by the memory that they take
"""
