//! XXH3 with 64 bits over registered memory: one pass, straight into vector registers.
//!
//! Registered memory is never a slice, so a hash that takes slices needs a copy first, which costs as much as the
//! hash. This one reads through a raw pointer as every copy in [`crate::memory`] does: another thread may change the
//! bytes meanwhile, and then the sum is that of some mix, which the comparison above finds. What is read is each
//! byte once (the last 64 twice), and the sum is bit for bit that of the XXH3 specification, version 0.8.
//!
//! Runs that follow one another have one sum together. Only what pays: more than 240 bytes, on processors with AVX2, which
//! is found out at run time. Vectors of 512 bits were measured too: what bounds this is memory, and the processor's clock falls
//! for all that runs beside.
//!
//! While it computes, memory has nothing to do; so one prefetch a stripe brings in the bytes that are moved next. Or the
//! bytes are copied on the way, from the registers that they are summed in: memory is gone over once for both, and what is
//! summed is what was written. Such a copy goes past the caches, which need not read first what it writes over.

use std::ptr;

/// How far ahead of the reading bytes are fetched: memory has answered by then, and so has the page table.
pub(crate) const AHEAD: usize = 4 << 10;

/// Inputs up to here take another algorithm, in which there is nothing to gain.
const SHORT: usize = 240;
/// Bytes that are taken at once.
const STRIPE: usize = 64;
/// Stripes before the accumulators are scrambled.
const BLOCK: usize = 16;
const PRIME32_1: u32 = 0x9E37_79B1;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;

/// The start of the accumulators, as the specification has it.
const START: [u64; 8] = [
    0xC2B2_AE3D,
    PRIME64_1,
    0xC2B2_AE3D_27D4_EB4F,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x85EB_CA77,
    0x27D4_EB2F_1656_67C5,
    PRIME32_1 as u64,
];

/// The default secret of the specification.
#[rustfmt::skip]
static SECRET: [u8; 192] = [
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
];

/// The sum of runs of memory that follow one another, in the making.
pub(crate) struct Xxh3 {
    acc: [u64; 8],
    stripes: usize,
    len: usize,
}

impl Xxh3 {
    /// One of nothing; `None` where this module has nothing to offer.
    pub(crate) fn new() -> Option<Xxh3> {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            return Some(Xxh3 { acc: START, stripes: 0, len: 0 });
        }
        None
    }

    /// Takes a run: whole stripes, and of the last run at least one; false where it is not so. Meanwhile `len` bytes at
    /// `next` are brought into the cache: a hint, for which any address will do.
    ///
    /// # Safety
    /// `at` is mapped and readable for `len` bytes during the call.
    pub(crate) unsafe fn add(&mut self, at: *const u8, len: usize, last: bool, next: *const u8) -> bool {
        // SAFETY: the caller's promise; nothing is written.
        unsafe { self.take::<false>((at, len, last), next, ptr::null_mut()) }
    }

    /// Takes a run as [`Xxh3::add`] does, and copies it; false, with nothing copied, also where `to` is no multiple of 64.
    ///
    /// # Safety
    /// `at` is readable and `to` writable for `len` bytes during the call, and they do not overlap.
    pub(crate) unsafe fn copy(&mut self, at: *const u8, len: usize, last: bool, to: *mut u8) -> bool {
        if !to.addr().is_multiple_of(STRIPE) {
            return false;
        }
        // SAFETY: the caller's promise, and `to` is aligned.
        unsafe { self.take::<true>((at, len, last), at.wrapping_add(AHEAD), to) }
    }

    /// # Safety
    /// As for [`Xxh3::add`], or where it is copied for [`Xxh3::copy`], and `to` is a multiple of 64.
    unsafe fn take<const COPY: bool>(
        &mut self,
        (at, len, last): (*const u8, usize, bool),
        next: *const u8,
        to: *mut u8,
    ) -> bool {
        if !(last || len.is_multiple_of(STRIPE)) || len < STRIPE {
            return false;
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has AVX2, or there would be no `self`; the rest is the caller's promise.
        unsafe {
            let run = (at, len, last);
            self.stripes += vectors::accumulate::<COPY>(&mut self.acc, self.stripes, run, next, to);
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (at, next, to, self.stripes);
        self.len += len;
        true
    }

    /// The sum; `None` where there are too few bytes for what this module computes. The last run was added.
    pub(crate) fn finish(self) -> Option<u64> {
        (self.len > SHORT).then(|| finish(self.acc, self.len))
    }
}

fn secret(at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&SECRET[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Folds the accumulators into the sum.
fn finish(acc: [u64; 8], len: usize) -> u64 {
    let mut sum = (len as u64).wrapping_mul(PRIME64_1);
    for (i, pair) in acc.chunks_exact(2).enumerate() {
        let (left, right) = (pair[0] ^ secret(11 + 16 * i), pair[1] ^ secret(19 + 16 * i));
        let product = u128::from(left) * u128::from(right);
        sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }
    sum ^= sum >> 37;
    sum = sum.wrapping_mul(0x1656_6791_9E37_79F9);
    sum ^ sum >> 32
}

#[cfg(target_arch = "x86_64")]
mod vectors {
    use super::*;
    use std::arch::x86_64::*;

    /// Takes the stripes of a run, and copies them if so: how many were whole ones. Of the last run the last stripe ends
    /// where the run ends, and may go back into the one before.
    ///
    /// # Safety
    /// The processor has AVX2; `at` is readable for `len` bytes, at least a stripe, and whole ones but for the last run. For
    /// a copy `to` is aligned to 64 bytes and writable for `len`, and they do not overlap.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn accumulate<const COPY: bool>(
        acc: &mut [u64; 8],
        before: usize,
        (at, len, last): (*const u8, usize, bool),
        next: *const u8,
        to: *mut u8,
    ) -> usize {
        let stripes = (len - usize::from(last)) / STRIPE;
        let out = acc.as_mut_ptr();
        // SAFETY: stripes lie within `len` bytes of `at`: the last whole one ends at len or before, the very last at len,
        // and len >= 64. Of the secret the offsets 0..=120, 121 and 128 are read, 64 bytes each, of 192. `out` has 64
        // bytes. A prefetch of an address that is not mapped is ignored. What is written lies as far from `to` as what is
        // read from `at`: whole stripes, which keep its alignment, and the very last one, which is written as it comes.
        unsafe {
            let mut acc = (_mm256_loadu_si256(out.cast()), _mm256_loadu_si256(out.add(4).cast()));
            for number in 0..stripes {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(number * STRIPE).cast());
                let within = (before + number) % BLOCK;
                let data = load(at.add(number * STRIPE));
                if COPY {
                    let to: *mut __m256i = to.add(number * STRIPE).cast();
                    _mm256_stream_si256(to, data.0);
                    _mm256_stream_si256(to.add(1), data.1);
                }
                acc = mix(acc, data, SECRET.as_ptr().add(within * 8));
                if within == BLOCK - 1 {
                    acc = scramble(acc, SECRET.as_ptr().add(128));
                }
            }
            if last {
                let data = load(at.add(len - STRIPE));
                if COPY {
                    let to: *mut __m256i = to.add(len - STRIPE).cast();
                    _mm256_storeu_si256(to, data.0);
                    _mm256_storeu_si256(to.add(1), data.1);
                }
                acc = mix(acc, data, SECRET.as_ptr().add(121));
            }
            _mm256_storeu_si256(out.cast(), acc.0);
            _mm256_storeu_si256(out.add(4).cast(), acc.1);
        }
        if COPY {
            // No lock orders what goes past the caches: whoever hears of the copy is to find it there.
            _mm_sfence();
        }
        stripes
    }

    type Pair = (__m256i, __m256i);

    /// # Safety
    /// `from` is readable for 64 bytes.
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const u8) -> Pair {
        // SAFETY: the caller's promise, half by half; unaligned loads.
        unsafe { (_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())) }
    }

    /// # Safety
    /// `secret` is readable for 64 bytes.
    #[target_feature(enable = "avx2")]
    unsafe fn mix(acc: Pair, data: Pair, secret: *const u8) -> Pair {
        // SAFETY: the caller's promise, half by half.
        unsafe { (half(acc.0, data.0, secret), half(acc.1, data.1, secret.add(32))) }
    }

    /// # Safety
    /// `secret` is readable for 32 bytes.
    #[target_feature(enable = "avx2")]
    unsafe fn half(acc: __m256i, data: __m256i, secret: *const u8) -> __m256i {
        // SAFETY: the caller's promise; an unaligned load.
        let key = unsafe { _mm256_loadu_si256(secret.cast()) };
        let mixed = _mm256_xor_si256(data, key);
        let product = _mm256_mul_epu32(mixed, _mm256_shuffle_epi32::<0x31>(mixed));
        _mm256_add_epi64(product, _mm256_add_epi64(acc, _mm256_shuffle_epi32::<0x4E>(data)))
    }

    /// # Safety
    /// `secret` is readable for 64 bytes.
    #[target_feature(enable = "avx2")]
    unsafe fn scramble(acc: Pair, secret: *const u8) -> Pair {
        // SAFETY: the caller's promise, half by half.
        unsafe { (scramble_half(acc.0, secret), scramble_half(acc.1, secret.add(32))) }
    }

    /// # Safety
    /// `secret` is readable for 32 bytes.
    #[target_feature(enable = "avx2")]
    unsafe fn scramble_half(acc: __m256i, secret: *const u8) -> __m256i {
        // SAFETY: the caller's promise; an unaligned load.
        let key = unsafe { _mm256_loadu_si256(secret.cast()) };
        let mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64::<47>(acc)), key);
        let prime = _mm256_set1_epi64x(i64::from(PRIME32_1));
        let low = _mm256_mul_epu32(mixed, prime);
        let high = _mm256_mul_epu32(_mm256_shuffle_epi32::<0x31>(mixed), prime);
        _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high))
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use twox_hash::XxHash3_64;

    /// The sum of runs that follow one another.
    fn sum(runs: &[&[u8]], next: *const u8) -> Option<u64> {
        let mut sum = Xxh3::new()?;
        for (number, run) in runs.iter().enumerate() {
            // SAFETY: the slice lives.
            if !unsafe { sum.add(run.as_ptr(), run.len(), number + 1 == runs.len(), next) } {
                return None;
            }
        }
        sum.finish()
    }

    fn bytes(len: u32) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 253) as u8).collect()
    }

    fn wide() -> bool {
        std::arch::is_x86_feature_detected!("avx2")
    }

    #[test]
    fn every_length_gives_the_sum_of_the_specification() {
        let bytes = bytes(if cfg!(miri) { 3000 } else { 200_000 });
        // Around the ends of stripes and blocks, and what pages are. Interpreted, one of each kind.
        let few = [241, 256, 257, 1024, 1087, 1088, 1089, 2113].into_iter();
        let many =
            (241..700).chain(960..1090).chain(2000..2120).chain([4096, 4097, 65_536, 131_072, 199_000]);
        let lens: Vec<usize> = if cfg!(miri) { few.collect() } else { many.collect() };
        for len in lens {
            for start in [0, 1, 7] {
                let part = &bytes[start..start + len];
                let expected = XxHash3_64::oneshot(part);
                // What comes next may be anywhere, also nowhere.
                for next in [part.as_ptr(), std::ptr::null(), part.as_ptr().wrapping_add(1 << 40)] {
                    assert_eq!(sum(&[part], next), wide().then_some(expected), "{len} bytes from {start}");
                }
            }
        }
        assert_eq!(sum(&[&bytes[..SHORT]], std::ptr::null()), None, "short inputs take another algorithm");
    }

    #[test]
    fn what_is_copied_has_the_sum_of_what_was_written() {
        let bytes = bytes(if cfg!(miri) { 3000 } else { 140_000 });
        let lens: &[usize] = if cfg!(miri) {
            &[257, 1088, 2113]
        } else {
            &[241, 256, 257, 1024, 1087, 1089, 131_072, 139_000]
        };
        for (len, start) in lens.iter().flat_map(|len| [0, 1, 7].map(|start| (*len, start))) {
            let part = &bytes[start..start + len];
            let mut room = vec![0xEE; len + 192];
            let at = room.as_ptr().align_offset(STRIPE) + STRIPE;
            let Some(mut sum) = Xxh3::new() else { return };
            // SAFETY: both live, and do not overlap; the room is that large.
            assert!(unsafe { sum.copy(part.as_ptr(), len, true, room.as_mut_ptr().add(at)) });
            assert_eq!(sum.finish(), Some(XxHash3_64::oneshot(part)), "{len} bytes from {start}");
            assert_eq!(&room[at..at + len], part);
            let around = room[..at].iter().chain(&room[at + len..]);
            assert!(around.into_iter().all(|byte| *byte == 0xEE), "{len} bytes from {start} went further");
            let Some(mut sum) = Xxh3::new() else { return };
            // SAFETY: as above.
            assert!(!unsafe { sum.copy(part.as_ptr(), len, true, room.as_mut_ptr().add(at + 32)) });
        }
    }

    #[test]
    fn runs_of_whole_stripes_give_the_sum_of_all_their_bytes() {
        let bytes = bytes(5000);
        let cuts: [&[usize]; 8] = [
            &[64, 192],
            &[512, 512],
            &[1024, 1024],
            &[1024, 64],
            &[960, 64, 64],
            &[64, 960, 77],
            &[128, 2048, 1000],
            &[1024, 1024, 1024, 1024],
        ];
        for cut in cuts {
            let mut rest = &bytes[3..];
            let mut runs = Vec::new();
            for len in cut {
                let (run, behind) = rest.split_at(*len);
                // Apart in memory, so that nothing is read beyond a run.
                runs.push(run.to_vec());
                rest = behind;
            }
            let runs: Vec<&[u8]> = runs.iter().map(Vec::as_slice).collect();
            let expected = XxHash3_64::oneshot(&runs.concat());
            assert_eq!(sum(&runs, std::ptr::null()), wide().then_some(expected), "{cut:?}");
        }
        assert_eq!(
            sum(&[&bytes[..100], &bytes[..500]], std::ptr::null()),
            None,
            "half a stripe is in two runs"
        );
        assert_eq!(
            sum(&[&bytes[..512], &bytes[..63]], std::ptr::null()),
            None,
            "the last stripe is in two runs"
        );
    }
}
