/* The tables of GIDs: for each of three addresses an entry for RoCE v1, and one for v2. */
#include "wire.h"

#include <string.h>

int gid_at(uint32_t device, uint32_t turn, uint32_t index, union ibv_gid *gid, uint32_t *type) {
    static const uint8_t addresses[3][16] = {
        {0xFE, 0x80},
        {[10] = 0xFF, [11] = 0xFF, [12] = 10, [13] = 77},
        {0xFD, 0x77},
    };
    if (index >= GIDS || device >= MAX_DEVICES) {
        return 0;
    }
    /* The addresses that the port gets anew are put where there is room: not always in the same order. */
    uint32_t which = index / 2;
    which = which > 0 && turn % 2 == 1 ? 3 - which : which;
    memcpy(gid->raw, addresses[which], sizeof gid->raw);
    gid->raw[15] = (uint8_t)(device + 1);
    *type = index % 2 == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
    return 1;
}
