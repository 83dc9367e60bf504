/* Feeds encoded plans to the decoder under the address and undefined-behaviour sanitizers.
 *
 * Input file: records of `u32 size` and that many bytes. Every plan that is accepted is evaluated on several leaves and
 * written out, so an index that slipped through reads or writes out of bounds here. Prints `accepted refused`. */
#include "_plan.h"

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void exercise(const Plan *plan) {
    uint64_t *leaves = malloc(8 * (plan->num_leaves + 1)), *values = malloc(8 * (plan->num_nodes + 1));
    uint8_t *canonical = malloc(plan_canonical_size(plan) + 1), *block = malloc(plan->block_bytes + 1);
    char name[512];
    for (int round = 0; round < 4; round++) {
        for (uint32_t i = 0; i < plan->num_leaves; i++) {
            leaves[i] = low_bits(round ? next_random() : 0, TYPE_BITS[leaf_type(plan, i)]);
            leaf_name(plan, i, name, sizeof name);
        }
        if (round & 1)
            plan_evaluate(plan, leaves, values);
        else
            for (int part = 0; part < NUM_DEPENDS; part++) plan_evaluate_part(plan, part, leaves, values);
        plan_failed_guard(plan, values, DEPENDS_NOTHING);
        plan_write_canonical(plan, values, canonical);
        for (uint32_t p = 0; p < plan->num_params; p++) {
            uint64_t dims[5], strides[4];
            const Param *param = &plan->params[p];
            if (param->kind == PARAM_BYTES)
                plan_write_bytes(plan, param, values, block + param->place);
            else
                plan_map_numbers(&plan->maps[param->first], values, dims, strides),
                    memset(block + param->place, 0, MAP_BYTES);
        }
        for (uint32_t i = 0; i < plan->num_launches; i++)
            for (int k = 0; k < 3; k++) node_signed(plan, values, plan->launches[i].grid[k]);
    }
    free(leaves), free(values), free(canonical), free(block);
}

int main(int argc, char **argv) {
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    unsigned accepted = 0, refused = 0;
    uint32_t size;
    if (!file) return 2;
    while (fread(&size, 4, 1, file) == 1) {
        uint8_t *data = malloc(size ? size : 1); /* of exactly this size, so that reading past the end is caught */
        Plan plan;
        if (fread(data, 1, size, file) != size) return 3;
        if (plan_decode(&plan, data, size) == 0)
            exercise(&plan), plan_clear(&plan), accepted++;
        else
            refused++;
        free(data);
    }
    printf("%u %u\n", accepted, refused);
    return fclose(file);
}
