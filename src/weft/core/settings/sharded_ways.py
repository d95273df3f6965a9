"""How a rank on a GPU sums rows of which some are a peer's.

``"pieces"`` of rows, remote ones read while local ones are summed; ``"tiles"`` of remote rows that arrive while the
plain SpMM sums what is there; ``"fetched"``: all remote rows first, then one plain SpMM.
"""

WAYS = ("pieces", "tiles", "fetched")
