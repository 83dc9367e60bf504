/* Findings: records, each said once for a pair of places. The twin of findings.py; check_texts.py has the words. */
#include "checks_state.h"

static chk_finding blank(const chk_cluster *cluster, chk_kind kind, uint32_t cta, int32_t site) {
    return (chk_finding){
        .kind = (int32_t)kind, .site = site, .other = -1, .cluster = (int32_t)cluster->index, .cta = (int32_t)cta,
        .first_warp = -1, .last_warp = -1, .agent_kind = -1, .agent_a = -1, .agent_b = -1, .lane = -1,
        .other_lane = -1, .extra = {-1, -1, -1, -1},
    };
}

chk_finding chk_finding_of_cta(const chk_cluster *cluster, uint32_t cta, chk_kind kind) {
    return blank(cluster, kind, cta, -1);
}

chk_finding chk_finding_at(const chk_cluster *cluster, const chk_gang *gang, chk_kind kind, int32_t site) {
    chk_finding finding = blank(cluster, kind, gang->cta, site);
    finding.first_warp = gang->warps[0];
    finding.last_warp = gang->warps[gang->num_warps - 1];
    finding.num_warps = (int32_t)gang->num_warps;
    return finding;
}

void chk_name_agent(const chk_cluster *cluster, chk_finding *finding, int32_t component) {
    finding->agent_kind = cluster->keys[component].kind;
    finding->agent_a = cluster->keys[component].a;
    finding->agent_b = cluster->keys[component].b;
}

/* ---- once for a pair of places ----------------------------------------------------------------------------------- */

typedef struct {
    int64_t parts[5];
} identity;

/* What makes two findings the same one: never coarser than the key that findings.py gives them. */
static identity identity_of(const chk_finding *f) {
    switch (f->kind) {
    case CHK_EXIT_BULK_READ:
    case CHK_EXIT_BULK_OPEN:
    case CHK_UNDEFINED_REGISTER: return (identity){{f->kind, f->site, f->extra[0]}};
    case CHK_EXIT_WGMMA: return (identity){{f->kind, f->first_warp}};
    case CHK_EXIT_BARRIER_BYTES:
    case CHK_EXIT_BARRIER_HALF: return (identity){{f->kind, f->address}};
    case CHK_EXIT_TMEM:
    case CHK_EXIT_BUDGETS:
    case CHK_EXIT_REGISTER_FILE: return (identity){{f->kind, f->cta, f->first_warp}};
    case CHK_WGMMA_WRITTEN: return (identity){{f->kind, f->site}};
    case CHK_NOTE_UNFENCED_INIT: return (identity){{f->kind, f->site, f->other, f->address, f->extra[0]}};
    case CHK_NOTE_EARLY_REMOTE: return (identity){{f->kind, f->site, f->extra[0]}};
    case CHK_NOTE_UNOBSERVED: return (identity){{f->kind, f->site, f->address}};
    case CHK_NOTE_NAMED_LEFT: return (identity){{f->kind, f->cluster, f->cta, f->extra[0]}};
    case CHK_NOTE_NAMED_TWICE: return (identity){{f->kind, f->site, f->extra[0]}};
    default: return (identity){{f->kind, f->site, f->other}};
    }
}

static size_t hash_of(const identity *id) {
    uint64_t hash = 0;
    for (int i = 0; i < 5; i++) hash = (hash ^ (uint64_t)id->parts[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return (size_t)(hash % (2 * CHK_MAX_FINDINGS));
}

void chk_add(chk_launch *launch, const chk_finding *finding) {
    identity id = identity_of(finding);
    size_t place = hash_of(&id);
    for (; launch->seen[place]; place = (place + 1) % (2 * CHK_MAX_FINDINGS)) {
        identity other = identity_of(&launch->findings[launch->seen[place] - 1]);
        if (!memcmp(&other, &id, sizeof id)) return;
    }
    if (launch->num_findings == CHK_MAX_FINDINGS) {
        launch->lost++;
        return;
    }
    launch->findings[launch->num_findings] = *finding;
    launch->seen[place] = (int32_t)++launch->num_findings;
}

chk_status chk_report(chk_launch *launch, const chk_finding *finding) {
    if (finding->kind < 0 || finding->kind >= CHK_NUM_KINDS) return CHK_BAD_INPUT;
    chk_add(launch, finding);
    return CHK_OK;
}

size_t chk_findings(const chk_launch *launch, const chk_finding **out, size_t *lost) {
    *out = launch->findings;
    *lost = launch->lost;
    return launch->num_findings;
}
