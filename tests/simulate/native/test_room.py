"""Contract of how many clusters are in flight: what multiprocessors have room for, whatever bounds it."""

from fa4build.simulate.native.room import clusters_in_flight, ctas_on_a_multiprocessor


def test_shared_memory_registers_threads_and_ctas_bound_a_multiprocessor():
    """228 KiB with 1 KiB more a CTA; 65536 registers in steps of 8 a thread; 2048 threads; 32 CTAs."""
    assert ctas_on_a_multiprocessor(threads=32, smem=113 * 1024, registers=0) == 2  # 2 * 114 = 228
    assert ctas_on_a_multiprocessor(threads=32, smem=114 * 1024, registers=0) == 1
    assert ctas_on_a_multiprocessor(threads=128, smem=0, registers=81) == 5  # 88 * 128 = 11264; 5.8 of them
    assert ctas_on_a_multiprocessor(threads=500, smem=0, registers=0) == 4  # 512 threads
    assert ctas_on_a_multiprocessor(threads=32, smem=0, registers=0) == 32


def test_a_cluster_takes_the_room_of_its_ctas_and_one_always_fits():
    """3 multiprocessors hold one pair of CTAs that fill one each."""
    launch = {"smem": 200 * 1024, "registers": 128}
    assert clusters_in_flight((512, 1, 1), (2, 1, 1), multiprocessors=3, **launch) == 1
    assert clusters_in_flight((512, 1, 1), (2, 1, 1), multiprocessors=132, **launch) == 66
    assert clusters_in_flight((512, 1, 1), (4, 1, 1), multiprocessors=2, **launch) == 1
