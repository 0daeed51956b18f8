"""The parts of the balanced planner; ``omnibal.data.balance`` puts them together.

Once, at construction:

- ``sizing`` looks at the samples' loads: which dimension asks for more packs, how many packs all samples need;
- ``layout`` divides that many steps into blocks and windows, the same in all epochs;
- ``instructions.instruct`` says what every step should hold, with weights from ``scales``.

For every window of an epoch, ``planning.plan_steps``, every part of it compiled:

    shuffle ─► scales ─► division ─► filling or dense ─► levelling ─► relief ─► packs in running order
    random     samples   steps of    every step's        exchanges    exchanges
    order      measured  equal load  first packs         to balance   to keep the limits

``tables`` describes the arrays that all of them work on, ``exchange`` is the one move that levelling and relief are
made of, ``subsets`` finds the samples for it. Where limits are tight, relief comes before levelling, too; what it
cannot bring under the limits is scattered for another try (``scattering``).
"""
