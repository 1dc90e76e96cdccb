"""Steps of a tile's epilogue: its beginning in every kernel, and its subtiles if no result leaves by TMA."""

import cutlass.cute as cute

from epifuse.providers.cutedsl.design import WARP_GROUP

TOGETHER = 1  # named barriers of the threads of each warp group (two ids)


def begin(epilogue, at, held, threads, *, was_read=False):
    """Return the `Tile` at a place. Afterwards every thread of the warp group may read `held`, the vectors that were
    fetched. `was_read`: all threads are known to have read those of the tile before, so no barrier waits for that."""
    if epilogue.deposits:
        together = {"barrier_id": TOGETHER + threads.group, "number_of_threads": WARP_GROUP}
        if not was_read:
            cute.arch.barrier(**together)
        epilogue.deposit(held, threads.shared, threads.group, threads.thread)
        cute.arch.barrier(**together)
    return epilogue.tile(at, held)


def subtiles(epilogue, values, tile, threads):
    """Run the epilogue on each subtile in order. The next subtile's operands are loaded before this one is computed."""
    last, count, scene = len(epilogue.walks) - 1, epilogue.division.subtiles, epilogue.scene
    coming: dict = {}
    for s in range(count):
        arrived = coming
        if scene.begins(s):
            epilogue.reduce_rows(s, values, tile, threads)
            arrived = epilogue.arrive(last, s, threads)
        coming = {} if scene.begins(s + 1) else epilogue.arrive(last, s + 1, threads)
        epilogue.subtile(s, values, arrived, tile, threads)
