"""How many units have full parameters at the same time, whoever keeps them."""


class UnitsAlive:
    """Counts from now on; `most` is the largest number."""

    def __init__(self, opt):
        self.most = 0
        if opt._own.home.units is None:
            return
        schedule = opt._own.home.units.schedule
        put = schedule.put

        def counted(i, fulls):
            put(i, fulls)
            alive = {unit for storage, unit, _ in schedule.known.values() if storage() is not None}
            coming = set() if schedule.coming is None else {schedule.coming[0]}
            self.most = max(self.most, len(alive | coming))

        schedule.put = counted
