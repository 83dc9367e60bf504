/* Replays recorded streams of events into the native hazard checks, whole and then damaged in random ways: for builds
 * with the address and undefined-behaviour sanitizers.
 *
 *     checks_fuzz SEED ROUNDS STREAM...
 *
 * A stream file: the number of buffers, (base, bytes, followed or not) of each, then the events (checks_replay.h). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checks_replay.h"

#define MAX_BUFFERS 64
#define MAX_BYTES ((size_t)96 << 20)

typedef struct {
    chk_buffer buffers[MAX_BUFFERS];
    size_t num_buffers, count;
    int64_t *words;
} stream;

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return below ? state % below : 0;
}

static void load(const char *path, stream *s) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    fseek(file, 0, SEEK_END);
    size_t total = (size_t)ftell(file) / 8;
    rewind(file);
    int64_t *all = malloc(8 * total + 8);
    if (!all || fread(all, 8, total, file) != total || all[0] > MAX_BUFFERS) exit(2);
    fclose(file);
    s->num_buffers = (size_t)all[0];
    for (size_t i = 0; i < s->num_buffers; i++) {
        const int64_t *row = all + 1 + 3 * i;
        int32_t *written = row[2] ? calloc((size_t)(row[1] + 3) / 4, 4) : NULL;
        s->buffers[i] = (chk_buffer){(uint64_t)row[0], (uint64_t)row[1], written};
    }
    s->count = total - 1 - 3 * s->num_buffers;
    s->words = malloc(8 * s->count + 8);
    memcpy(s->words, all + 1 + 3 * s->num_buffers, 8 * s->count);
    free(all);
}

static int64_t odd_word(const int64_t *words, size_t count) {
    static const int64_t edges[] = {0, 1, -1, 31, 32, 127, 128, 511, 512, 1023, 1 << 16, INT32_MAX, INT32_MIN,
                                    UINT32_MAX, INT64_MAX, INT64_MIN};
    switch (draw(4)) {
    case 0: return edges[draw(sizeof edges / sizeof *edges)];
    case 1: return (int64_t)draw(64);
    case 2: return (int64_t)((uint64_t)words[draw(count)] + draw(3) - 1);
    default: return words[draw(count)];
    }
}

/* Where the events of a stream start; as many as fit. */
static size_t event_starts(const int64_t *words, size_t count, size_t *starts, size_t room) {
    size_t found = 0;
    for (size_t at = 0; at + 2 <= count && found < room; at += 2 + (size_t)words[at + 1]) starts[found++] = at;
    return found;
}

static void damage(int64_t *words, size_t count, const size_t *starts, size_t events) {
    for (uint64_t n = 1 + draw(40); n > 0; n--) {
        size_t start = starts[draw(events)], length = (size_t)words[start + 1];
        if (draw(50) == 0) words[start + draw(2)] = odd_word(words, count); /* number or length of the event */
        else if (length && length < count - start)
            words[start + 2 + draw(length < 24 ? length : 24)] = odd_word(words, count);
    }
}

static void replay(const stream *s, const int64_t *words, size_t count, size_t *refused) {
    chk_launch *launch = chk_launch_create(s->buffers, s->num_buffers, MAX_BYTES);
    if (!launch) exit(3);
    chk_replayed done;
    const chk_finding *findings;
    size_t lost;
    chk_replay(launch, words, count, &done);
    chk_findings(launch, &findings, &lost);
    *refused += done.refused;
    chk_launch_destroy(launch);
}

static size_t fuzz(const stream *s, uint64_t rounds) {
    size_t refused = 0, events = 0, *starts = malloc(sizeof *starts * (s->count / 2 + 1));
    events = event_starts(s->words, s->count, starts, s->count / 2 + 1);
    for (uint64_t i = 0; i < rounds && events; i++) {
        size_t count = draw(3) ? s->count : draw(s->count + 1);
        int64_t *words = malloc(8 * s->count + 8), *exact;
        memcpy(words, s->words, 8 * s->count);
        damage(words, s->count, starts, events);
        exact = malloc(8 * count + (count == 0)); /* so that one word too far is one too many */
        memcpy(exact, words, 8 * count);
        replay(s, exact, count, &refused);
        free(words);
        free(exact);
    }
    free(starts);
    return refused;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    state = 2 * strtoull(argv[1], NULL, 10) + 0x9E3779B97F4A7C15u;
    for (int i = 3; i < argc; i++) {
        stream s;
        size_t refused = 0;
        load(argv[i], &s);
        replay(&s, s.words, s.count, &refused);
        if (refused) return 1;
        refused = fuzz(&s, strtoull(argv[2], NULL, 10));
        printf("%s: %zu words, %zu events refused\n", argv[i], s.count, refused);
        for (size_t k = 0; k < s.num_buffers; k++) free(s.buffers[k].written);
        free(s.words);
    }
    return 0;
}
