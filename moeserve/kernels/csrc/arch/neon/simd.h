// The vector types and functions that the kernels use, for AArch64 with the dot product instructions of Armv8.2: a
// value of 512 bits is four registers. Where x86-64 and AArch64 differ (NaN in a maximum, conversions), these functions
// do as x86-64's do, so that AVX2 and NEON give the same bits.

constexpr int kSumsInRegisters =
    4;                        // accumulators (VF or VI) of a kernel; each takes four of the 32 registers
constexpr int kRowLanes = 4;  // floats per vector in sampling/row_passes.inl
constexpr bool kGathersPairs = false;

struct VF {  // 16 float32
  float32x4_t a, b, c, d;
};
struct VI {  // 16 int32
  int32x4_t a, b, c, d;
};
struct VB {  // 64 bytes
  uint8x16_t a, b, c, d;
};

// Applies f to each register of x, or to the registers of x and y, or of x, y and z, that have the same place.
template <class To, class F, class X>
inline To map(const F& f, const X& x) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <class To, class F, class X, class Y>
inline To map(const F& f, const X& x, const Y& y) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}
template <class To, class F, class X, class Y, class Z>
inline To map(const F& f, const X& x, const Y& y, const Z& z) {
  return {f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)};
}

inline VF set_f(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline VF zero_f() { return set_f(0.0f); }
inline VF load_f(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store_f(float* p, VF a) {
  vst1q_f32(p, a.a);
  vst1q_f32(p + 4, a.b);
  vst1q_f32(p + 8, a.c);
  vst1q_f32(p + 12, a.d);
}
// The second number if one is NaN or both are zeros, as vmaxps has it.
inline float32x4_t max_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t min_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline VF add(VF a, VF b) {
  return map<VF>([](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); }, a, b);
}
inline VF sub(VF a, VF b) {
  return map<VF>([](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); }, a, b);
}
inline VF mul(VF a, VF b) {
  return map<VF>([](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); }, a, b);
}
inline VF div(VF a, VF b) {
  return map<VF>([](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); }, a, b);
}
inline VF max(VF a, VF b) { return map<VF>(max_4, a, b); }
inline VF min(VF a, VF b) { return map<VF>(min_4, a, b); }
inline VF abs(VF a) {
  return map<VF>([](float32x4_t x) { return vabsq_f32(x); }, a);
}
inline VF fma(VF a, VF b, VF c) {  // a*b + c
  return map<VF>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
inline VF fnma(VF a, VF b, VF c) {  // c - a*b
  return map<VF>([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmsq_f32(z, x, y); }, a, b, c);
}
inline float32x4_t from_half(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
inline VF load_half(const uint16_t* p) {
  const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
  return {from_half(vget_low_u16(lo)), from_half(vget_high_u16(lo)), from_half(vget_low_u16(hi)),
          from_half(vget_high_u16(hi))};
}
inline float32x4_t from_bfloat(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
inline VF load_bfloat(const uint16_t* p) {
  const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
  return {from_bfloat(vget_low_u16(lo)), from_bfloat(vget_high_u16(lo)), from_bfloat(vget_low_u16(hi)),
          from_bfloat(vget_high_u16(hi))};
}
inline uint16x8_t halves_of(float32x4_t x, float32x4_t y) {
  return vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x), vcvt_f16_f32(y)));
}
inline void store_half(uint16_t* p, VF a) {
  vst1q_u16(p, halves_of(a.a, a.b));
  vst1q_u16(p + 8, halves_of(a.c, a.d));
}
inline VF round_even(VF a) {
  return map<VF>([](float32x4_t x) { return vrndnq_f32(x); }, a);
}
// 2^n for integral n in [-126, 127].
inline VF exp2_int(VF n) {
  return map<VF>(
      [](float32x4_t x) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
      },
      n);
}
inline VF blend_less(VF a, VF b, VF yes, VF no) {  // a < b ? yes : no
  auto less = [](float32x4_t x, float32x4_t y) { return vreinterpretq_u8_u32(vcltq_f32(x, y)); };
  return map<VF>(
      [](uint8x16_t m, float32x4_t x, float32x4_t y) { return vbslq_f32(vreinterpretq_u32_u8(m), x, y); },
      map<VB>(less, a, b), yes, no);
}

inline VI set_i(int x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline VI load_i(const void* p) {
  const auto* v = static_cast<const uint8_t*>(p);
  auto four = [v](int i) { return vreinterpretq_s32_u8(vld1q_u8(v + 16 * i)); };
  return {four(0), four(1), four(2), four(3)};
}
// Loads 32 int16: two per lane.
inline VI load_pairs(const int16_t* p) { return load_i(p); }
inline VI broadcast_pair(const int16_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return set_i(x);
}
inline VI dot2(VI acc, VI a, VI pair) {
  auto dot = [](int32x4_t sum, int32x4_t x, int32x4_t y) {
    const int16x8_t s = vreinterpretq_s16_s32(x), t = vreinterpretq_s16_s32(y);
    return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(s), vget_low_s16(t)), vmull_high_s16(s, t)));
  };
  return map<VI>(dot, acc, a, pair);
}
// Widens to int16 the first and third of each lane's four int8 (even), or the second and fourth (odd).
inline void store_odd_bytes(int16_t* p, VB a) {
  auto upper = [](uint8x16_t x) { return vshrq_n_s16(vreinterpretq_s16_u8(x), 8); };
  vst1q_s16(p, upper(a.a));
  vst1q_s16(p + 8, upper(a.b));
  vst1q_s16(p + 16, upper(a.c));
  vst1q_s16(p + 24, upper(a.d));
}
inline void store_even_bytes(int16_t* p, VB a) {
  auto raised = [](uint8x16_t x) { return vreinterpretq_u8_s16(vshlq_n_s16(vreinterpretq_s16_u8(x), 8)); };
  store_odd_bytes(p, map<VB>(raised, a));
}
// Interleaves two rows of 16 int8, widened to int16.
inline void store_byte_pairs(int16_t* p, const uint8_t* a, const uint8_t* b) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(a)), y = vreinterpretq_s8_u8(vld1q_u8(b));
  const int8x16_t lo = vzip1q_s8(x, y), hi = vzip2q_s8(x, y);
  vst1q_s16(p, vmovl_s8(vget_low_s8(lo)));
  vst1q_s16(p + 8, vmovl_high_s8(lo));
  vst1q_s16(p + 16, vmovl_s8(vget_low_s8(hi)));
  vst1q_s16(p + 24, vmovl_high_s8(hi));
}
inline int16x8_t narrow(int32x4_t x, int32x4_t y) { return vcombine_s16(vqmovn_s32(x), vqmovn_s32(y)); }
inline VI nearest(VF a) {
  return map<VI>([](float32x4_t x) { return vcvtnq_s32_f32(x); }, a);
}
inline void store_i16(int16_t* p, VF a, VF b) {  // stores 32 int16, rounded to even and saturated
  const VI x = nearest(a), y = nearest(b);
  vst1q_s16(p, narrow(x.a, x.b));
  vst1q_s16(p + 8, narrow(x.c, x.d));
  vst1q_s16(p + 16, narrow(y.a, y.b));
  vst1q_s16(p + 24, narrow(y.c, y.d));
}
inline VF as_float(VI bits) {
  return map<VF>([](int32x4_t x) { return vreinterpretq_f32_s32(x); }, bits);
}
inline VF to_float(VI a) {
  return map<VF>([](int32x4_t x) { return vcvtq_f32_s32(x); }, a);
}
inline VI load_u8(const uint8_t* p) {  // widens 16 bytes to 16 lanes
  const uint8x16_t x = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(x)), hi = vmovl_high_u8(x);
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_high_u16(lo)),
          vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_high_u16(hi))};
}
inline VI load_i8(const uint8_t* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t lo = vmovl_s8(vget_low_s8(x)), hi = vmovl_high_s8(x);
  return {vmovl_s16(vget_low_s16(lo)), vmovl_high_s16(lo), vmovl_s16(vget_low_s16(hi)), vmovl_high_s16(hi)};
}
inline VI and_i(VI a, int mask) {
  return map<VI>([m = vdupq_n_s32(mask)](int32x4_t x) { return vandq_s32(x, m); }, a);
}
inline VI or_i(VI a, VI b) {
  return map<VI>([](int32x4_t x, int32x4_t y) { return vorrq_s32(x, y); }, a, b);
}
inline VI sub_i(VI a, VI b) {
  return map<VI>([](int32x4_t x, int32x4_t y) { return vsubq_s32(x, y); }, a, b);
}
inline VI xor_i(VI a, VI b) {
  return map<VI>([](int32x4_t x, int32x4_t y) { return veorq_s32(x, y); }, a, b);
}
inline VI max_i(VI a, VI b) {
  return map<VI>([](int32x4_t x, int32x4_t y) { return vmaxq_s32(x, y); }, a, b);
}
template <int N>
inline VI shr_i(VI a) {
  if constexpr (N == 0) {
    return a;
  } else {
    auto shifted = [](int32x4_t x) {
      return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
    };
    return map<VI>(shifted, a);
  }
}
template <int N>
inline VI shl_i(VI a) {
  return map<VI>([](int32x4_t x) { return vshlq_n_s32(x, N); }, a);
}
// Converts float16 bits in the lanes to float32.
inline VF half_bits(VI a) {
  return map<VF>([](int32x4_t x) { return from_half(vmovn_u32(vreinterpretq_u32_s32(x))); }, a);
}
// Stores 16 lanes in [-128, 127] as 16 bytes; NaN becomes -128.
inline void store_i8(int8_t* p, VF rounded) {
  auto number = [](float32x4_t x) {
    return vbslq_s32(vceqq_f32(x, x), vcvtnq_s32_f32(x), vdupq_n_s32(-128));
  };
  const VI n = map<VI>(number, rounded);
  vst1q_s8(p, vcombine_s8(vqmovn_s16(narrow(n.a, n.b)), vqmovn_s16(narrow(n.c, n.d))));
}

#include "arch/neon/bytes.h"

// Adds in the order that arch/plain/simd.h gives.
inline float reduce_add(VF a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.a, a.c), vaddq_f32(a.b, a.d));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float reduce_max(VF a) {
  const float32x4_t four = max_4(max_4(a.a, a.c), max_4(a.b, a.d));
  const float32x4_t two = max_4(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(max_4(two, vextq_f32(two, two, 1)), 0);
}
