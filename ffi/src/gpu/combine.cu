// Reductions on the GPU: dst[i] = ((src_0[i] op src_1[i]) op src_2[i]) ..., all sources in one pass. One text, compiled at run time by
// NVRTC with JC_TYPE (the FFI number of the element type) and JC_OP (0 sum, 1 max, 2 min, 3 prod) set, so no header is included. It gives
// the bits of reduce/combine.h; a test compiles it for the host as well and compares.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define JC_MAX_SOURCES 128

struct JcArgs {
  void* dst;
  const void* src[JC_MAX_SOURCES];
  u64 wide[JC_MAX_SOURCES / 64];  // bit k: source k holds f32 partial sums of a narrow type
  u64 n;
  u32 count, dst_wide;
};

template <typename To, typename From>
__device__ inline To JcAs(From from) {
  union { From from; To to; } x;
  x.from = from;
  return x.to;
}
__device__ inline float JcFloat(u32 bits) { return JcAs<float>(bits); }
__device__ inline u32 JcBits(float f) { return JcAs<u32>(f); }
__device__ inline double JcDouble(u64 bits) { return JcAs<double>(bits); }
__device__ inline u64 JcBits(double f) { return JcAs<u64>(f); }

struct JcBf16 {
  typedef u16 Storage;
  static __device__ float Load(u16 s) { return JcFloat((u32)s << 16); }
  static __device__ u16 Store(float f) {
    u32 u = JcBits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u16)((u >> 16) | 0x40u);
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
};

// A float of 1 + E + M bits. Inf: IEEE infinities; Fnuz: no infinities, no negative zero, NaN is the sign bit alone; neither: only the
// all-ones pattern is NaN.
template <typename S, int E, int M, int Bias, bool Inf, bool Fnuz>
struct JcSmall {
  typedef S Storage;
  static const u32 kSign = 1u << (E + M), kTop = (1u << E) - 1, kFrac = (1u << M) - 1;
  static const u32 kMax = Inf ? ((kTop - 1) << M) | kFrac : Fnuz ? kSign - 1 : kSign - 2;
  static const u32 kNan = Fnuz ? kSign : Inf ? (kTop << M) | (1u << (M - 1)) : kSign - 1;
  static const u32 kOver = Inf ? kTop << M : kNan;

  // 2^e for -126 <= e <= 127, which covers every exponent of these types.
  static __device__ float Power(int e) { return JcFloat((u32)(e + 127) << 23); }

  static __device__ float Load(S s) {
    u32 sign = (u32)(s & kSign) << (31 - E - M), exp = (s >> M) & kTop, frac = s & kFrac;
    if (Fnuz && s == kSign) return JcFloat(0x7fc00000u);
    if (Inf && exp == kTop) return JcFloat(sign | 0x7f800000u | (frac ? 0x400000u : 0u));
    if (!Inf && !Fnuz && (s & (kSign - 1)) == kSign - 1) return JcFloat(sign | 0x7fc00000u);
    float v = exp == 0 ? (float)frac * Power(1 - Bias - M) : (float)(frac | (1u << M)) * Power((int)exp - Bias - M);
    return JcFloat(JcBits(v) | sign);
  }

  static __device__ S Store(float f) {
    u32 u = JcBits(f), sign = u >> 31 ? kSign : 0, mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return (S)(Fnuz ? kSign : sign | kNan);
    if (mag == 0x7f800000u) return (S)(Fnuz ? kSign : sign | kOver);
    int exp = (int)(mag >> 23) - 127;
    u32 pattern = 0;
    if (exp >= 1 - Bias) {
      // Normal: round the 23 bits to M, ties to even; a carry goes on into the exponent by itself.
      u32 kept = 23 - M, half = (1u << (kept - 1)) - 1;
      u32 rounded = mag + half + ((mag >> kept) & 1u);
      pattern = (rounded >> kept) - ((u32)(127 - Bias) << M);
    } else if (mag >> 23) {
      // Below the normals the last kept bit weighs 2^(1 - Bias - M).
      int shift = 1 - Bias - M - (exp - 23);
      if (shift < 32) {
        u32 man = (mag & 0x7fffffu) | 0x800000u, half = 1u << (shift - 1), rest = man & ((half << 1) - 1);
        pattern = shift == 31 ? 0 : man >> shift;
        if (rest > half || (rest == half && (pattern & 1u))) ++pattern;
      }
    }
    if (pattern > kMax) return (S)(Fnuz ? kSign : sign | kOver);
    if (Fnuz && pattern == 0) return 0;
    return (S)(sign | pattern);
  }
};

template <typename T>
struct JcComplex {
  T re, im;
};

// How a type is stored and computed with. Compute: f32 for the narrow floats, else the type itself.
template <typename T>
struct JcPlain {
  typedef T Storage;
  typedef T Compute;
  static const bool narrow = false;
  static __device__ T Load(T s) { return s; }
  static __device__ T Store(T s) { return s; }
};
template <typename F>
struct JcNarrow {
  typedef typename F::Storage Storage;
  typedef float Compute;
  static const bool narrow = true;
  static __device__ float Load(Storage s) { return F::Load(s); }
  static __device__ Storage Store(float f) { return F::Store(f); }
};

template <int Number> struct JcType;
template <> struct JcType<1> : JcPlain<u8> {};
template <> struct JcType<2> : JcPlain<signed char> {};
template <> struct JcType<3> : JcPlain<short> {};
template <> struct JcType<4> : JcPlain<int> {};
template <> struct JcType<5> : JcPlain<long long> {};
template <> struct JcType<6> : JcPlain<u8> {};
template <> struct JcType<7> : JcPlain<u16> {};
template <> struct JcType<8> : JcPlain<u32> {};
template <> struct JcType<9> : JcPlain<u64> {};
template <> struct JcType<10> : JcNarrow<JcSmall<u16, 5, 10, 15, true, false> > {};
template <> struct JcType<11> : JcPlain<float> {};
template <> struct JcType<12> : JcPlain<double> {};
template <> struct JcType<15> : JcPlain<JcComplex<float> > {};
template <> struct JcType<16> : JcNarrow<JcBf16> {};
template <> struct JcType<18> : JcPlain<JcComplex<double> > {};
template <> struct JcType<19> : JcNarrow<JcSmall<u8, 5, 2, 15, true, false> > {};
template <> struct JcType<20> : JcNarrow<JcSmall<u8, 4, 3, 7, false, false> > {};
template <> struct JcType<23> : JcNarrow<JcSmall<u8, 4, 3, 11, false, true> > {};
template <> struct JcType<24> : JcNarrow<JcSmall<u8, 5, 2, 16, false, true> > {};
template <> struct JcType<25> : JcNarrow<JcSmall<u8, 4, 3, 8, false, true> > {};
template <> struct JcType<28> : JcNarrow<JcSmall<u8, 4, 3, 7, true, false> > {};
template <> struct JcType<29> : JcNarrow<JcSmall<u8, 3, 4, 3, true, false> > {};

// Signed sums and products wrap around: computed without sign.
template <typename T> struct JcUnsigned { typedef T Type; };
template <> struct JcUnsigned<signed char> { typedef u64 Type; };
template <> struct JcUnsigned<short> { typedef u64 Type; };
template <> struct JcUnsigned<int> { typedef u64 Type; };
template <> struct JcUnsigned<long long> { typedef u64 Type; };
template <> struct JcUnsigned<u16> { typedef u64 Type; };

template <int Op> struct JcOp;
template <> struct JcOp<0> {
  template <typename T> static __device__ T Do(T a, T b) {
    typedef typename JcUnsigned<T>::Type U;
    return (T)((U)a + (U)b);
  }
  template <typename T> static __device__ JcComplex<T> Do(JcComplex<T> a, JcComplex<T> b) {
    JcComplex<T> c = {a.re + b.re, a.im + b.im};
    return c;
  }
};
template <> struct JcOp<3> {
  template <typename T> static __device__ T Do(T a, T b) {
    typedef typename JcUnsigned<T>::Type U;
    return (T)((U)a * (U)b);
  }
  template <typename T> static __device__ JcComplex<T> Do(JcComplex<T> a, JcComplex<T> b) {
    JcComplex<T> c = {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    return c;
  }
};
// A NaN on either side wins; -0 is less than +0.
__device__ inline float JcAnd(float a, float b) { return JcFloat(JcBits(a) & JcBits(b)); }
__device__ inline float JcOr(float a, float b) { return JcFloat(JcBits(a) | JcBits(b)); }
__device__ inline double JcAnd(double a, double b) { return JcDouble(JcBits(a) & JcBits(b)); }
__device__ inline double JcOr(double a, double b) { return JcDouble(JcBits(a) | JcBits(b)); }
template <typename T> __device__ inline T JcAnd(T a, T) { return a; }
template <typename T> __device__ inline T JcOr(T a, T) { return a; }
template <> struct JcOp<1> {
  template <typename T> static __device__ T Do(T a, T b) { return a == b ? JcAnd(a, b) : a > b || a != a ? a : b; }
};
template <> struct JcOp<2> {
  template <typename T> static __device__ T Do(T a, T b) { return a == b ? JcOr(a, b) : a < b || a != a ? a : b; }
};

template <typename T, int Count>
struct __align__(sizeof(T) * Count <= 16 ? sizeof(T) * Count : 16) JcPack {
  T v[Count];
};

template <typename T, int Op>
struct JcKernel {
  typedef typename T::Storage Storage;
  typedef typename T::Compute Compute;
  static const int kPack = sizeof(Storage) >= 16 ? 1 : 16 / sizeof(Storage);  // elements of one 16-byte load

  static __device__ bool Wide(const JcArgs& a, u32 k) { return T::narrow && ((a.wide[k / 64] >> (k % 64)) & 1u); }

  static __device__ Compute One(const JcArgs& a, u32 k, u64 i) {
    if (Wide(a, k)) return ((const Compute*)a.src[k])[i];
    return T::Load(((const Storage*)a.src[k])[i]);
  }

  static __device__ void Scalar(const JcArgs& a, u64 i) {
    Compute acc = One(a, 0, i);
    for (u32 k = 1; k < a.count; ++k) acc = JcOp<Op>::Do(acc, One(a, k, i));
    if (T::narrow && a.dst_wide) ((Compute*)a.dst)[i] = acc;
    else ((Storage*)a.dst)[i] = T::Store(acc);
  }

  static __device__ void LoadPack(const JcArgs& a, u32 k, u64 at, Compute* out) {
    if (Wide(a, k)) {
      const int kWide = sizeof(Compute) >= 16 ? 1 : 16 / sizeof(Compute);
      const JcPack<Compute, kWide>* p = (const JcPack<Compute, kWide>*)((const Compute*)a.src[k] + at);
      for (int j = 0; j < kPack / kWide; ++j) {
        JcPack<Compute, kWide> x = p[j];
        for (int e = 0; e < kWide; ++e) out[j * kWide + e] = x.v[e];
      }
      return;
    }
    JcPack<Storage, kPack> x = *(const JcPack<Storage, kPack>*)((const Storage*)a.src[k] + at);
    for (int e = 0; e < kPack; ++e) out[e] = T::Load(x.v[e]);
  }

  static __device__ void Vector(const JcArgs& a, u64 at) {
    Compute acc[kPack], next[kPack];
    LoadPack(a, 0, at, acc);
    for (u32 k = 1; k < a.count; ++k) {
      LoadPack(a, k, at, next);
      for (int e = 0; e < kPack; ++e) acc[e] = JcOp<Op>::Do(acc[e], next[e]);
    }
    if (T::narrow && a.dst_wide) {
      for (int e = 0; e < kPack; ++e) ((Compute*)a.dst)[at + e] = acc[e];
      return;
    }
    JcPack<Storage, kPack> y;
    for (int e = 0; e < kPack; ++e) y.v[e] = T::Store(acc[e]);
    *(JcPack<Storage, kPack>*)((Storage*)a.dst + at) = y;
  }

  static __device__ bool Aligned(const JcArgs& a) {
    u64 bits = (u64)a.dst;
    for (u32 k = 0; k < a.count; ++k) bits |= (u64)a.src[k];
    return (bits & 15u) == 0;
  }

  static __device__ void Run(const JcArgs& a, u64 first, u64 stride) {
    u64 packed = Aligned(a) ? a.n / kPack * kPack : 0;
    for (u64 i = first * kPack; i < packed; i += stride * kPack) Vector(a, i);
    for (u64 i = packed + first; i < a.n; i += stride) Scalar(a, i);
  }
};

#ifdef JC_TYPE
extern "C" __global__ void jc_combine(const JcArgs a) {
  JcKernel<JcType<JC_TYPE>, JC_OP>::Run(a, (u64)blockIdx.x * blockDim.x + threadIdx.x, (u64)gridDim.x * blockDim.x);
}
#endif
