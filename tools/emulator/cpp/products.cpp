// Products of warps and warp groups, and 16-bit numbers.
#include "state.h"

namespace emu {
namespace {

uint16_t element_at(uint64_t descriptor, bool mn_major, int mn, int k, const races::Operation& reader) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const int layout = descriptor >> 62;  // 0: none, 1: 128 bytes, 2: 64 bytes, 3: 32 bytes
  const int bits = layout == 0 ? 0 : 4 - layout;
  uint32_t offset;
  if (!mn_major) {
    // Rows of one atom follow each other; eight of them, then `stride`.
    offset = (mn & 7) * (16u << bits) + (mn >> 3) * stride;
    offset += layout == 0 ? (k >> 3) * leading + (k & 7) * 2 : k * 2;
  } else if (layout == 0) {
    offset = (mn & 7) * 2 + (mn >> 3) * stride + (k & 7) * 16 + (k >> 3) * leading;
  } else {
    const int width = 8 << bits;  // elements of a row of an atom
    offset = (mn % width) * 2 + (mn / width) * leading + (k & 7) * (16u << bits) + (k >> 3) * stride;
  }
  const uint32_t address = swizzled(start + offset, bits);
  races::access(address, 2, false, reader);
  uint16_t value;
  std::memcpy(&value, raw(address), 2);
  return value;
}

float number(uint16_t bits, bool half) { return half ? from_half(bits) : from_bfloat16(bits); }

void check_span(uint64_t descriptor, const char* who) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  if (start < m.dynamic.address || start >= m.dynamic.address + m.dynamic.bytes)
    fail("%s: a descriptor must start in dynamic shared memory, but it starts at %s", who, shared_name(start).c_str());
  if (descriptor >> 49 & 7) fail("%s: base offsets of descriptors are not modelled", who);
}

// The 16 rows of one warp.
void execute(const Warp& warp, const Issued& issued) {
  const Product& p = issued.product;
  const int n = p.columns, row0 = (warp.first / 32 & 3) * 16;
  static float a[16][16], b[16][256], acc[16][256];
  if (p.registers) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {  // pairs: rows 0 and 8, then columns 8
        const uint16_t bits = issued.registers[lane][i >> 1] >> (i & 1) * 16;
        a[(lane >> 2) + (i >> 1 & 1) * 8][(lane & 3) * 2 + (i & 1) + (i >> 2) * 8] = number(bits, p.half) * p.sign;
      }
  } else {
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k)
        a[r][k] = number(element_at(p.a, p.a_mn, row0 + r, k, issued.operation), p.half) * p.sign;
  }
  for (int k = 0; k < 16; ++k)
    for (int c = 0; c < n; ++c) b[k][c] = number(element_at(p.b, p.b_mn, c, k, issued.operation), p.half);
  auto for_accumulators = [&](auto body) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < n / 2; ++i)
        body(issued.accumulators[lane][i],
             acc[(lane >> 2) + (i >> 1 & 1) * 8][(i >> 2) * 8 + (lane & 3) * 2 + (i & 1)]);
  };
  for_accumulators([&](float& held, float& place) { place = p.keep ? held : 0.f; });
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < 16; ++k) {
      const float factor = a[r][k];
      for (int c = 0; c < n; ++c) acc[r][c] += factor * b[k][c];
    }
  for_accumulators([](float& held, float& place) { held = place; });
}

void execute_first(Warp& warp, size_t count) {
  for (size_t i = 0; i < count; ++i) execute(warp, warp.products[i]);
  warp.products.erase(warp.products.begin(), warp.products.begin() + count);
}

}  // namespace

void product_issue(const Product& product) {
  struct Arguments {
    Product product;
    const void* place;
  } mine{product, __builtin_return_address(0)};
  collective("wgmma", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    Warp& warp = this_warp();
    auto& group = m.groups[warp.first / 128];
    Issued issued;
    issued.product = static_cast<Arguments*>(lanes[0])->product;
    const Product& p = issued.product;
    if (!warp.fenced) fail("wgmma: warpgroup_arrive must come before the first product of a group");
    if (!p.registers) check_span(p.a, "wgmma");
    check_span(p.b, "wgmma");
    for (int i = 0; i < 32; ++i) {
      const Product& other = static_cast<Arguments*>(lanes[i])->product;
      if (other.b != p.b || other.keep != p.keep || (!p.registers && other.a != p.a))
        fail("wgmma: all lanes of a warp must bring the same descriptors and flags, but lane %d differs", i);
      issued.registers[i] = other.registers;
      issued.accumulators[i] = other.accumulators;
    }
    if (warp.issued == group.size()) {
      group.push_back({p.registers ? 0 : p.a, p.b, p.columns});
    } else {
      const Signature& same = group[warp.issued];
      if (same.b != p.b || same.columns != p.columns || (!p.registers && same.a != p.a))
        fail("wgmma: the warps of a group must issue the same products, but warp %u differs", warp.first / 32);
    }
    ++warp.issued;
    ++warp.uncommitted;
    issued.operation = races::begin_product(warp.first, static_cast<Arguments*>(lanes[0])->place);
    warp.products.push_back(issued);
    if (one_in(m.eager_products)) execute_first(warp, warp.products.size());
  });
}

void product_fence() {
  collective("warpgroup_arrive", 0xffffffffu, nullptr, [](void* const*, uint32_t) { this_warp().fenced = true; });
}

void product_commit() {
  collective("warpgroup_commit_batch", 0xffffffffu, nullptr, [](void* const*, uint32_t) {
    Warp& warp = this_warp();
    warp.open_groups.push_back(warp.uncommitted);
    warp.uncommitted = 0;
    warp.fenced = false;
  });
}

void product_wait(int pending) {
  collective("wait_wgmma", 0xffffffffu, &pending, [](void* const* lanes, uint32_t) {
    Warp& warp = this_warp();
    const size_t stay = *static_cast<int*>(lanes[0]);
    size_t kept = warp.uncommitted;
    while (warp.open_groups.size() > stay) warp.open_groups.erase(warp.open_groups.begin());
    for (size_t products : warp.open_groups) kept += products;
    if (warp.products.size() > kept) execute_first(warp, warp.products.size() - kept);
    races::Operation last;
    last.agent = m.threads.size() + warp.first / 32;
    last.moment = warp.issued - kept;
    for (unsigned i = 0; i < 32; ++i) races::ended(warp.first + i, last);
  });
}

void warp_product(float* d, const uint32_t* a, const uint32_t* b, const float* c, int k, bool half) {
  struct Arguments {
    float* d;
    const uint32_t *a, *b;
    const float* c;
    int k;
    bool half;
  } mine{d, a, b, c, k, half};
  collective("mma", 0xffffffffu, &mine, [](void* const* lanes, uint32_t) {
    const Arguments& first = *static_cast<Arguments*>(lanes[0]);
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Arguments& at = *static_cast<Arguments*>(lanes[lane]);
      const int row = lane >> 2, pair = (lane & 3) * 2;
      for (int i = 0; i < first.k / 2; ++i)  // halves of the registers of A: rows 0 and 8, then columns 8
        a[row + (i >> 1 & 1) * 8][pair + (i & 1) + (i >> 2) * 8] = number(at.a[i >> 1] >> (i & 1) * 16, first.half);
      for (int i = 0; i < first.k / 4; ++i)
        b[pair + (i & 1) + (i >> 1) * 8][row] = number(at.b[i >> 1] >> (i & 1) * 16, first.half);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Arguments& at = *static_cast<Arguments*>(lanes[lane]);
      for (int i = 0; i < 4; ++i) {
        const int row = (lane >> 2) + (i >> 1) * 8, column = (lane & 3) * 2 + (i & 1);
        float sum = at.c[i];
        for (int k = 0; k < first.k; ++k) sum += a[row][k] * b[k][column];
        at.d[i] = sum;
      }
    }
  });
}

float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
  union {
    uint32_t word;
    float value;
  } both;
  if (exponent == 0) {
    both.value = mantissa * 0x1p-24f;
    both.word |= sign;
  } else {
    both.word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  return both.value;
}

uint16_t to_half(float value) {
  union {
    float value;
    uint32_t word;
  } both{value};
  const uint16_t sign = both.word >> 16 & 0x8000u;
  both.word &= 0x7fffffffu;
  if (both.word > 0x7f800000u) return 0x7fff;
  if (both.word >= 0x477ff000u) return sign | 0x7c00;
  if (both.word < 0x38800000u) {  // subnormal: at 0.5 a float's last bit is that of a subnormal half
    both.value += 0.5f;
    return sign | uint16_t(both.word - 0x3f000000u);
  }
  return sign | uint16_t((both.word - 0x38000000u + 0xfffu + (both.word >> 13 & 1u)) >> 13);
}

void check_products() {
  for (size_t w = 0; w < m.warps.size(); ++w) {
    const Warp& warp = m.warps[w];
    size_t open = warp.uncommitted;
    for (size_t products : warp.open_groups) open += products;
    if (open)
      m.error = say("warp %zu of block %u exited with %zu products that it did not wait for", w, blockIdx.x, open);
    if (warp.issued != m.groups[w / 4].size())
      m.error = say("warp %zu of block %u issued %zu products, another warp of its group %zu", w, blockIdx.x,
                    warp.issued, m.groups[w / 4].size());
  }
}

}  // namespace emu
