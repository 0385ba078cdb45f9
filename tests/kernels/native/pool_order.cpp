// Shows what results alone do not: when the pool lets go of an operation, its slot, a phase and a turn. A thread is held
// at a chosen place, and what must wait for it is watched meanwhile. `test_pool_order.py` builds this with
// ThreadSanitizer, which also reports memory that two threads use without an order between them.
//
//   pool_order SCENARIO    prints what was wrong and exits with 1, or prints nothing
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "handoff/turn.h"
#include "pool/pool.h"

namespace {

using moeserve::Claim;
using moeserve::Pool;
using moeserve::Team;
using moeserve::ThreadPlacement;
using std::chrono::milliseconds;

int failures = 0;

void expect(bool is_right, const char* what) {
  if (is_right) return;
  ++failures;
  std::printf("%s\n", what);
}

// Threads that no CPU is set for, by the NUMA node of each.
std::vector<ThreadPlacement> threads_of_nodes(const std::vector<int>& nodes) {
  std::vector<ThreadPlacement> placements;
  for (const int node : nodes) placements.push_back({node, {}});
  return placements;
}

// Waits until `is_so()`, for at most `time`; a minute is for what only a failure does not reach.
template <class F>
bool comes(F&& is_so, milliseconds time = milliseconds(60'000)) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (!is_so()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// How long a thread is held for what must not happen meanwhile.
constexpr milliseconds kHeld(300);

// Holds the first thread that comes, until it is let go.
struct Hold {
  std::atomic<bool> has_come{false}, is_held{false}, may_go{false};

  bool takes() { return !has_come.exchange(true); }
  void hold() {
    is_held = true;
    comes([&] { return may_go.load(); });
    is_held = false;
  }
};

constexpr int kUnits = 8;

// --- wait() ---
struct Held {
  Hold hold;
  std::unique_ptr<std::vector<int>> list = std::make_unique<std::vector<int>>(kUnits, 7);
  std::atomic<int> claims[kUnits] = {};
  std::atomic<int> sum{0};
  std::atomic<bool> late_claim{false};
};

// One thread is held before its claim; the others compute its unit again and leave.
struct HeldOp {
  Held* held;
  void operator()(Team& team) const {
    team.for_claimed_units(kUnits, [this](int64_t unit, Claim& claim) {
      const bool is_late = held->hold.takes();
      if (is_late) held->hold.hold();
      held->sum += (*held->list)[unit];
      if (!claim()) return;
      ++held->claims[unit];
      if (is_late) held->late_claim = true;
    });
  }
};

// Memory that the pool was given is freed after wait(): no thread may be in an operation then.
void wait_is_for_all_threads() {
  Pool pool(threads_of_nodes({0, 0, 0}));
  Held held;
  std::atomic<bool> has_returned{false}, may_wait{false};
  pool.submit(HeldOp{&held});
  std::thread waiting([&] {
    comes([&] { return may_wait.load(); });
    pool.wait();
    has_returned = true;
    held.list->assign(kUnits, -1'000'000);
    held.list.reset();
  });
  const auto all_claimed = [&] {
    return std::all_of(std::begin(held.claims), std::end(held.claims), [](const auto& n) { return n == 1; });
  };
  expect(comes(all_claimed), "the unit of a thread that is held was not computed by another");
  may_wait = true;
  expect(!comes([&] { return has_returned.load(); }, kHeld),
         "wait() returned while a thread was in an operation");
  held.hold.may_go = true;
  waiting.join();
  expect(all_claimed() && !held.late_claim, "a unit was claimed twice");
  expect(held.sum == 7 * (kUnits + static_cast<int>(pool.recomputed())),
         "a list was freed while it was read");
}

// --- the end of a phase ---
enum class Division { kUnits, kPanels, kMatrices, kOnlyPhase };

struct TwoPhases {
  Hold hold;
  int first[kUnits] = {};
  std::atomic<int> done{0}, early{0};
};

// Units of very unequal length: one takes until it is let go. The second phase reads the results of the whole first.
struct TwoPhasesOp {
  TwoPhases* seen;
  Division division;

  void compute(int64_t unit) const {
    if (seen->hold.takes()) seen->hold.hold();
    seen->first[unit] = 1;
    ++seen->done;
  }
  void operator()(Team& team) const {
    if (division == Division::kOnlyPhase) {
      team.last_phase();
      return team.for_units(kUnits, [this](int64_t unit) { compute(unit); });
    }
    if (division == Division::kUnits) team.for_units(kUnits, [this](int64_t unit) { compute(unit); });
    if (division == Division::kPanels) {
      team.for_panels(2, kUnits / 2, [this](int64_t o, int64_t panel) { compute(o * kUnits / 2 + panel); });
    }
    if (division == Division::kMatrices) {  // the claim comes first, so no other thread computes it
      team.for_claimed_matrices(
          2, [](int) { return int64_t{kUnits / 2}; },
          [this](int j, int64_t panel, Claim& claim) {
            if (claim()) compute(j * kUnits / 2 + panel);
          });
    }
    team.last_phase();
    team.for_units(kUnits, [this](int64_t) {
      if (seen->done != kUnits) ++seen->early;
      if (std::count(std::begin(seen->first), std::end(seen->first), 1) != kUnits) ++seen->early;
    });
  }
};

// A small operation, which the thread that ends the one before computes in passing.
struct SmallOp {
  TwoPhases* seen;
  bool is_small() const { return true; }
  void operator()(Team& team) const {
    team.for_units(1, [this](int64_t) {
      if (seen->done != kUnits) ++seen->early;
    });
  }
};

template <class Submit>
void expect_not_early(const std::vector<int>& nodes, Submit&& submit, const char* what) {
  Pool pool(threads_of_nodes(nodes));
  TwoPhases seen;
  submit(pool, seen);
  expect(comes([&] { return seen.hold.is_held.load() && seen.done == kUnits - 1; }),
         "the other units were not computed");
  comes([&] { return seen.early > 0; }, kHeld / 3);
  seen.hold.may_go = true;
  pool.wait();
  expect(seen.early == 0, what);
}

void a_phase_ends_with_its_last_unit() {
  for (const Division division : {Division::kUnits, Division::kPanels, Division::kMatrices}) {
    const auto submit = [&](Pool& pool, TwoPhases& seen) { pool.submit(TwoPhasesOp{&seen, division}); };
    expect_not_early({0, 0, 0}, submit, "a phase began before the one before it was computed");
    expect_not_early({0, 0, 1, 1}, submit, "a phase began before another node's part of the one before");
  }
  const auto submit = [](Pool& pool, TwoPhases& seen) {
    pool.submit(TwoPhasesOp{&seen, Division::kOnlyPhase});
    pool.submit(SmallOp{&seen});
  };
  expect_not_early({0, 0, 0}, submit, "a small operation was computed before the one before it");
}

// --- the ring of operations ---
constexpr int kRing = 1024, kOperations = kRing + 76;

struct Ring {
  Hold hold;
  std::atomic<int> units{0}, submitted{0}, changed{0};
};

// The operation itself lies in the ring; the held thread reads it again when it is let go.
struct RingOp {
  Ring* ring;
  int number;
  void operator()(Team& team) const {
    team.for_claimed_units(2, [this](int64_t, Claim& claim) {
      const int before = *const_cast<volatile const int*>(&number);
      if (ring->hold.takes()) ring->hold.hold();
      if (*const_cast<volatile const int*>(&number) != before) ++ring->changed;
      if (claim()) ++ring->units;
    });
  }
};

void a_slot_is_kept_until_all_threads_have_left_it() {
  Pool pool(threads_of_nodes({0, 0, 0}));
  Ring ring;
  std::thread submitting([&] {
    for (int i = 0; i < kOperations; ++i) {
      pool.submit(RingOp{&ring, i});
      ++ring.submitted;
      if (i == 0) comes([&] { return ring.hold.is_held.load(); });
    }
    pool.wait();
  });
  expect(comes([&] { return ring.submitted >= kRing; }),
         "the ring does not hold as many operations as it should");
  comes([&] { return ring.submitted > kRing; }, kHeld);
  expect(ring.submitted == kRing, "a slot was filled again while a thread was in its operation");
  ring.hold.may_go = true;
  submitting.join();
  expect(ring.changed == 0, "an operation changed while a thread was in it");
  expect(ring.units == 2 * kOperations, "an operation ran twice, or not at all");
}

// --- claims ---
// A claim flag that holds the first thread behind its look at the flag. Operations that write are the atomic's own.
struct HeldFlag : std::atomic<uint64_t> {
  Hold hold;

  uint64_t load(std::memory_order order) {
    const uint64_t seen = std::atomic<uint64_t>::load(order);
    if (hold.takes()) hold.hold();
    return seen;
  }
};

// Both threads have seen the unit unclaimed; the one that is held must be refused.
void a_unit_is_claimed_once() {
  constexpr uint64_t kPhase = 5;
  HeldFlag flag;
  bool held_claim = true;
  std::thread held([&] { held_claim = moeserve::claim_unit(flag, kPhase); });
  expect(comes([&] { return flag.hold.is_held.load(); }), "no thread looked at the flag before its claim");
  expect(moeserve::claim_unit(flag, kPhase), "a unit that no thread has was not claimed");
  flag.hold.may_go = true;
  held.join();
  expect(!held_claim, "two threads claimed one unit");
  expect(!moeserve::claim_unit(flag, kPhase) && !moeserve::claim_unit(flag, kPhase - 1),
         "a claimed unit was claimed again");
  expect(moeserve::claim_unit(flag, kPhase + 1), "a unit was not claimed in the next phase");
}

// --- the turns of a hand-off ---
// A late thread must not compute with a turn whose place the next one is about to take.
void a_turn_is_not_read_once_the_next_is_claimed() {
  moeserve::Turns turns;
  moeserve::Turn turn, read;
  turn.has_work = 7;
  expect(turns.claim(1) && !turns.claim(1), "a turn was not claimed once");
  turns.publish(1, turn);
  expect(turns.is_ready(1) && turns.read(1, &read) && read.has_work == 7,
         "a turn was not read as it was published");
  expect(turns.claim(2) && !turns.is_ready(2), "a turn was ready before it was published");
  expect(!turns.read(1, &read), "a turn was read while the next one took its place");
  turns.publish(2, turn);
  expect(!turns.read(1, &read) && turns.read(2, &read), "another turn was read than the one asked for");
  expect(turns.end(2) && !turns.end(2) && !turns.end(1), "a turn ended twice");
}

// --- order in memory ---
constexpr int kWords = 48;
using Row = std::vector<uint64_t>;

uint64_t mixed(uint64_t a, uint64_t b) { return (a ^ (b << 7 | b >> 57)) * 0x9e3779b97f4a7c15; }

// out[i] depends on all of `in`, and takes the longer the larger i is. Rows are not used again: a thread whose claim is
// refused may still read them.
uint64_t word_of(const uint64_t* in, int64_t i) {
  uint64_t word = static_cast<uint64_t>(i);
  for (int64_t round = 0; round <= i / 8; ++round)
    for (int j = 0; j < kWords; ++j) word = mixed(word, in[j]);
  return word;
}

struct ChainOp {
  const uint64_t* in;
  uint64_t *between, *claimed, *out;  // [kWords] each

  void operator()(Team& team) const {
    team.for_units(kWords, [this](int64_t i) { between[i] = word_of(in, i); });
    team.for_claimed_panels(
        2, kWords / 2,
        [this](int64_t o, int64_t panel, Claim& claim) {
          const int64_t i = o * kWords / 2 + panel;
          const uint64_t word = word_of(between, i);
          if (claim()) claimed[i] = word;
        },
        Team::no_idle);
    team.last_phase();
    team.for_panels(1, kWords, [this](int64_t, int64_t i) { out[i] = word_of(claimed, i); });
  }
};

struct SmallChainOp {
  const uint64_t* in;
  uint64_t* out;
  bool is_small() const { return true; }
  void operator()(Team& team) const {
    team.for_units(kWords, [this](int64_t i) { out[i] = word_of(in, i); });
  }
};

Row chain(const std::vector<int>& nodes) {
  constexpr int kRounds = 60, kRows = 4;
  Pool pool(threads_of_nodes(nodes));
  std::vector<Row> rows(1 + kRounds * kRows, Row(kWords, 1));
  for (int round = 0; round < kRounds; ++round) {
    Row* row = &rows[round * kRows];
    pool.submit(ChainOp{row[0].data(), row[1].data(), row[2].data(), row[3].data()});
    pool.submit(SmallChainOp{row[3].data(), row[4].data()});
  }
  pool.wait();
  return rows.back();
}

void threads_see_each_others_results() {
  const Row expected = chain({0});
  const std::vector<std::vector<int>> pools = {{0, 0}, {0, 0, 0, 0, 0}, {0, 0, 1, 1}};
  for (int i = 0; i < 6; ++i)
    expect(chain(pools[i % pools.size()]) == expected, "several threads computed something else than one");
}

// What the sanitizer must report: shows that it works.
void two_threads_without_order() {
  int number = 0;
  std::thread other([&] { ++number; });
  ++number;
  other.join();
}

constexpr std::pair<const char*, void (*)()> kScenarios[] = {
    {"wait_is_for_all_threads", wait_is_for_all_threads},
    {"a_phase_ends_with_its_last_unit", a_phase_ends_with_its_last_unit},
    {"a_slot_is_kept_until_all_threads_have_left_it", a_slot_is_kept_until_all_threads_have_left_it},
    {"a_unit_is_claimed_once", a_unit_is_claimed_once},
    {"a_turn_is_not_read_once_the_next_is_claimed", a_turn_is_not_read_once_the_next_is_claimed},
    {"threads_see_each_others_results", threads_see_each_others_results},
    {"none", [] {}},
    {"two_threads_without_order", two_threads_without_order},
};

}  // namespace

int main(int argc, char** argv) {
  for (const auto& [name, run] : kScenarios) {
    if (argc != 2 || std::strcmp(argv[1], name) != 0) continue;
    run();
    return failures == 0 ? 0 : 1;
  }
  std::printf("no such scenario\n");
  return 2;
}
