// Copies of many pieces in one launch: pages of the KV-cache, which are too small for the driver's copy engine.
//
// `copy.ptx` beside this is made of it, by `python tools/copy_kernel.py`. That is what kvik carries, and what the driver
// compiles for the GPU that it meets; a test compares the two.

typedef unsigned u32;
typedef unsigned long long u64;

// A piece as the host writes it, into page-locked memory that is read here: `Piece` in piece.rs.
struct alignas(16) Piece {
    u64 to, from, len, unused;
};

enum : u32 {
    WARP = 32,
    ALL = ~0u,
    // Bytes that one warp copies at a time: `SHARE` in kernel.rs is the same. A multiple of the widest word, so that all
    // shares of a piece lie to the boundaries of words as the piece does.
    SHARE = 4096,
    // Words that a thread has read before it writes the first: the host's memory answers late. More take so many registers
    // that fewer threads find room beside a model's kernels.
    FLIGHT = 4,
};

// Copies words; both sides lie at boundaries of words.
template <typename Word>
__device__ __forceinline__ void words(u64 to, u64 from, u32 count, u32 lane) {
    Word *into = reinterpret_cast<Word *>(to) + lane;
    const Word *source = reinterpret_cast<const Word *>(from) + lane;
#pragma unroll 1
    for (u32 at = lane; at < count; at += FLIGHT * WARP) {
        Word held[FLIGHT];
#pragma unroll
        for (u32 k = 0; k < FLIGHT; k++) {
            if (at + k * WARP < count) {
                held[k] = __ldcs(source + k * WARP);
            }
        }
#pragma unroll
        for (u32 k = 0; k < FLIGHT; k++) {
            if (at + k * WARP < count) {
                __stcs(into + k * WARP, held[k]);
            }
        }
        into += FLIGHT * WARP;
        source += FLIGHT * WARP;
    }
}

// Copies bytes of which both sides lie alike to the boundaries of words. No more of them are before the first boundary,
// or behind the last, than a warp has threads.
template <typename Word>
__device__ __forceinline__ void bytes(u64 to, u64 from, u32 len, u32 lane) {
    u32 size = sizeof(Word);
    u32 head = min(static_cast<u32>(0 - to) % size, len);
    u32 count = (len - head) / size, tail = head + count * size;
    if (lane < head) {
        *reinterpret_cast<char *>(to + lane) = *reinterpret_cast<const char *>(from + lane);
    }
    words<Word>(to + head, from + head, count, lane);
    if (lane < len - tail) {
        *reinterpret_cast<char *>(to + tail + lane) = *reinterpret_cast<const char *>(from + tail + lane);
    }
}

// Copies `count` pieces of the list, each of at most `parts` shares. Warps take shares in turns: of 32 turns each thread
// reads where one goes, and then all of them copy those one after the other.
extern "C" __global__ void __launch_bounds__(256)
    kvik_copy_pieces(const Piece *list, u32 count, u32 parts) {
    u32 lane = threadIdx.x % WARP;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u32 warps = gridDim.x * blockDim.x / WARP;
    u32 shares = count * parts;
#pragma unroll 1
    for (u32 first = warp; first < shares; first += warps * WARP) {
        u64 to = 0, from = 0;
        u32 len = 0, mine = first + lane * warps;
        if (mine < shares) {
            const Piece *piece = list + mine / parts;
            ulonglong2 places = *reinterpret_cast<const ulonglong2 *>(&piece->to);
            u64 whole = piece->len, begin = static_cast<u64>(mine % parts) * SHARE;
            if (begin < whole) {
                to = places.x + begin;
                from = places.y + begin;
                len = static_cast<u32>(min(whole - begin, static_cast<u64>(SHARE)));
            }
        }
        // A piece that is shorter than the longest has fewer shares.
        u32 left = __ballot_sync(ALL, len > 0);
#pragma unroll 1
        for (; left != 0; left &= left - 1) {
            u32 turn = __ffs(left) - 1;
            u64 into = __shfl_sync(ALL, to, turn), source = __shfl_sync(ALL, from, turn);
            u32 some = __shfl_sync(ALL, len, turn);
            u32 apart = static_cast<u32>(into ^ source);
            if (apart % sizeof(uint4) == 0) {
                bytes<uint4>(into, source, some, lane);
            } else if (apart % sizeof(u32) == 0) {
                bytes<u32>(into, source, some, lane);
            } else {
                words<unsigned char>(into, source, some, lane);
            }
        }
    }
}
