// Transaction barriers, and copies between tensors and shared memory.
#include "state.h"

namespace emu {
namespace {

// Calls body(shared address, global pointer or null, bytes) for every element or run of elements of a box.
template <typename Body>
void for_box(const TensorMap& map, const int32_t* origin, uint32_t shared, Body body) {
  const uint32_t element = map.strides[0], row_elements = map.box[0];
  const uint32_t unit = 16 / element;
  uint32_t rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= map.box[d];
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t offset = 0;
    bool inside = true;
    for (uint32_t d = 1, rest = row; d < uint32_t(map.rank); ++d) {
      int64_t at = int64_t(origin[d]) + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && at >= 0 && at < int64_t(map.dims[d]);
      offset += uint64_t(at) * map.strides[d];
    }
    for (uint32_t column = 0; column < row_elements; column += unit) {
      const uint32_t place = swizzled(shared + (row * row_elements + column) * element, map.swizzle);
      const int64_t at = int64_t(origin[0]) + column, end = map.dims[0];
      if (inside && at >= 0 && at + unit <= end) {
        body(place, reinterpret_cast<char*>(map.base + offset + at * element), 16u);
      } else {
        for (uint32_t i = 0; i < unit; ++i) {
          bool present = inside && at + i >= 0 && at + i < end;
          body(place + i * element, present ? reinterpret_cast<char*>(map.base + offset + (at + i) * element) : nullptr,
               element);
        }
      }
    }
  }
}

uint32_t box_bytes(const TensorMap& map) {
  uint32_t bytes = map.strides[0];
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

void complete_phase(uint32_t address, Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.pending = b.count;
  ++b.phase;
  b.released.join(b.gathered);
  for (Thread& t : m.threads)
    if (t.wait == Wait::mbarrier && t.address == address) t.state = State::ready, t.wait = Wait::none;
}

Mbarrier& mbarrier_at(uint32_t address, const char* who) {
  uint64_t mark;
  std::memcpy(&mark, shared_pointer(address, 8, 8, who), 8);
  auto found = m.mbarriers.find(address);
  if (found == m.mbarriers.end())
    fail("%s: the mbarrier at %s must be initialised first", who, shared_name(address).c_str());
  if (mark != kBarrierMark)
    fail("%s: the mbarrier at %s was overwritten as if it were data", who, shared_name(address).c_str());
  return found->second;
}

void land(const LoadCopy& copy) {
  const uint32_t shared = copy.shared - m.shared;
  if (copy.global) {
    races::access(shared, copy.bytes, true, copy.operation);
    std::memcpy(copy.shared, copy.global, copy.bytes);
  } else {
    for_box(copy.map, copy.coordinates, shared, [&](uint32_t place, const char* global, uint32_t bytes) {
      races::access(place, bytes, true, copy.operation);
      if (global)
        std::memcpy(raw(place), global, bytes);
      else
        std::memset(raw(place), 0, bytes);
    });
  }
  Mbarrier& b = mbarrier_at(copy.barrier, "a tensor load");
  b.bytes -= copy.bytes;
  races::ended(b.gathered, copy.operation);
  complete_phase(copy.barrier, b);
}

void land(const StoreCopy& copy) {
  const uint32_t shared = copy.shared - m.shared;
  if (copy.global) {
    races::access(shared, copy.bytes, false, copy.operation);
    std::memcpy(copy.global, copy.shared, copy.bytes);
    return;
  }
  for_box(copy.map, copy.coordinates, shared, [&](uint32_t place, char* global, uint32_t bytes) {
    races::access(place, bytes, false, copy.operation);
    if (global) std::memcpy(global, raw(place), bytes);
  });
}

void check_map(const TensorMap& map, uint32_t shared, int rank, const char* who) {
  if (map.rank != rank) fail("%s: a tensor map of rank %d got %d coordinates", who, map.rank, rank);
  if (shared % 128) fail("%s: %s must be aligned to 128 bytes", who, shared_name(shared).c_str());
}

}  // namespace

void land_any_load() {
  const size_t which = m.random() % m.loads.size();
  const LoadCopy copy = m.loads[which];
  m.loads.erase(m.loads.begin() + which);
  land(copy);
}

void mbarrier_init(const void* barrier, uint32_t count) {
  const uint32_t address = shared_address(barrier);
  if (count == 0 || count >= 1u << 20) fail("an mbarrier must expect 1 .. 2^20 - 1 arrivals, but got %u", count);
  std::memcpy(shared_pointer(address, 8, 8, "mbarrier.init"), &kBarrierMark, 8);
  m.mbarriers[address] = {count, count, 0, 0, {}, {}};
}

void mbarrier_arrive(const void* barrier) {
  const uint32_t address = shared_address(barrier);
  Mbarrier& b = mbarrier_at(address, "mbarrier.arrive");
  if (b.pending == 0)
    fail("the mbarrier at %s got more than %u arrivals in a phase", shared_name(address).c_str(), b.count);
  races::release(b.gathered);
  --b.pending;
  complete_phase(address, b);
  yield();
}

void mbarrier_expect(const void* barrier, uint32_t bytes) {
  Mbarrier& b = mbarrier_at(shared_address(barrier), "mbarrier.expect_tx");
  b.bytes += bytes;
  if (b.bytes >= 1 << 20) fail("an mbarrier cannot expect %lld bytes", static_cast<long long>(b.bytes));
}

bool mbarrier_passed(const void* barrier, uint32_t parity) {
  const Mbarrier& b = mbarrier_at(shared_address(barrier), "mbarrier.test_wait");
  const bool passed = (b.phase & 1) != (parity & 1);
  if (passed) races::acquire(this_thread(), b.released);
  return passed;
}

void mbarrier_wait(const void* barrier, uint32_t parity) {
  while (!mbarrier_passed(barrier, parity)) {
    m.current->state = State::waiting;
    m.current->wait = Wait::mbarrier;
    m.current->parity = parity;
    m.current->address = shared_address(barrier);
    suspend();
  }
}

static void start(LoadCopy copy, const void* place) {
  mbarrier_at(copy.barrier, "a tensor load");
  copy.operation = races::begin_copy(place);
  if (m.poison_loads) {
    if (copy.global)
      std::memset(copy.shared, kPoison, copy.bytes);
    else
      for_box(copy.map, copy.coordinates, copy.shared - m.shared,
              [](uint32_t place, const char*, uint32_t bytes) { std::memset(raw(place), kPoison, bytes); });
  }
  if (one_in(m.eager_loads))
    land(copy);
  else
    m.loads.push_back(copy);
}

static void start(StoreCopy copy, const void* place) {
  copy.operation = races::begin_copy(place);
  m.current->open_stores.push_back(copy);
  if (one_in(m.eager_stores)) land(copy);
}

void tensor_load(const TensorMap& map, const void* barrier, const void* shared, const int32_t* coordinates, int rank) {
  LoadCopy copy;
  copy.map = map;
  copy.bytes = box_bytes(map);
  copy.shared = shared_pointer(shared_address(shared), copy.bytes, 16, "a tensor load");
  check_map(map, copy.shared - m.shared, rank, "a tensor load");
  copy.barrier = shared_address(barrier);
  std::memcpy(copy.coordinates, coordinates, rank * sizeof *coordinates);
  start(copy, __builtin_return_address(0));
}

void tensor_store(const TensorMap& map, const void* shared, const int32_t* coordinates, int rank) {
  StoreCopy copy;
  copy.map = map;
  copy.bytes = box_bytes(map);
  copy.shared = shared_pointer(shared_address(shared), copy.bytes, 16, "a tensor store");
  check_map(map, copy.shared - m.shared, rank, "a tensor store");
  std::memcpy(copy.coordinates, coordinates, rank * sizeof *coordinates);
  start(copy, __builtin_return_address(0));
}

void bulk_load(void* shared, const void* global, const void* barrier, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uint64_t>(global) % 16) fail("a bulk load must move aligned units of 16 bytes");
  check_tensor(global, bytes, "a bulk load");
  LoadCopy copy;
  copy.shared = shared_pointer(shared_address(shared), bytes, 16, "a bulk load");
  copy.global = static_cast<const char*>(global);
  copy.bytes = bytes;
  copy.barrier = shared_address(barrier);
  start(copy, __builtin_return_address(0));
}

void bulk_store(void* global, const void* shared, uint32_t bytes) {
  if (bytes % 16 || reinterpret_cast<uint64_t>(global) % 16) fail("a bulk store must move aligned units of 16 bytes");
  check_tensor(global, bytes, "a bulk store");
  StoreCopy copy;
  copy.shared = shared_pointer(shared_address(shared), bytes, 16, "a bulk store");
  copy.global = static_cast<char*>(global);
  copy.bytes = bytes;
  start(copy, __builtin_return_address(0));
}

void bulk_commit() {
  m.current->store_groups.push_back(m.current->open_stores);
  m.current->open_stores.clear();
}

void bulk_wait(int pending) {
  auto& groups = m.current->store_groups;
  while (groups.size() > size_t(pending)) {
    for (const StoreCopy& copy : groups.front()) {
      land(copy);
      races::ended(this_thread(), copy.operation);
    }
    groups.erase(groups.begin());
  }
}

static void land(const ThreadCopy& copy) {
  races::access(copy.shared - m.shared, copy.bytes, true);
  if (copy.global)
    std::memcpy(copy.shared, copy.global, copy.bytes);
  else
    std::memset(copy.shared, 0, copy.bytes);
}

void thread_copy(const void* shared, const void* global, uint32_t bytes) {
  char* place = shared_pointer(shared_address(shared), bytes, bytes, "cp.async");
  const ThreadCopy copy{place, static_cast<const char*>(global), bytes};
  if (global) check_tensor(global, bytes, "cp.async");
  if (reinterpret_cast<uint64_t>(global) % bytes)
    fail("cp.async must read from addresses aligned to its %u bytes", bytes);
  if (one_in(m.eager_loads))
    land(copy);
  else
    m.current->open_copies.push_back(copy);
}

void thread_copy_commit() {
  m.current->copy_groups.push_back(m.current->open_copies);
  m.current->open_copies.clear();
}

void thread_copy_wait(int pending) {
  auto& groups = m.current->copy_groups;
  while (groups.size() > size_t(pending)) {
    for (const ThreadCopy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

}  // namespace emu
