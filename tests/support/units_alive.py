"""How many units have full parameters at the same time, whoever keeps them."""


class UnitsAlive:
    """Counts from now on; `most` is the largest number."""

    def __init__(self, opt):
        self.most = 0
        if opt._own.home.units is None:
            return
        gathered = opt._own.home.units.gathered
        put = gathered.put

        def counted(i, fulls):
            put(i, fulls)
            alive = {unit for storage, unit, _ in gathered.known.values() if storage() is not None}
            self.most = max(self.most, len(alive | gathered.coming.keys()))

        gathered.put = counted
